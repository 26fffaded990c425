"""Tiny EAGLE-3 heads with random weights, as EAGLE and SGLang store them, and as speculators do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoints.checkpoint import Checkpoint

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96


def eagle_head(
    checkpoint: Path,
    folder: Path,
    *,
    reads: tuple[int, ...] | None = None,
    words: int | None = 120,
    mrope: bool = False,
    layers: int = 1,
    own_embeddings: bool = False,
    speculators: bool = False,
    **settings: Any,
) -> Path:
    """A head for the model of a checkpoint in a new folder; it knows every third token of so many words, None: all."""
    config = Checkpoint(checkpoint).config
    text = {**config, **(config.get("text_config") or {})}
    size, tokens = text["hidden_size"], text["vocab_size"]
    known = tokens if words is None else words
    own: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": tokens,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    if mrope:
        own["rope_scaling"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    outer = {"draft_vocab_size": known, **({"eagle_aux_hidden_state_layer_ids": list(reads)} if reads else {})}
    if speculators:
        made = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        written = {**made, **outer, **settings, "transformer_layer_config": own}
    else:
        written = {"architectures": ["LlamaForCausalLMEagle3"], **own, **outer, **settings}
    count = len(reads) if reads else 3
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, count * size), "norm.weight": (size,)}
    for layer in range(layers):
        name, width = ("midlayer." if layers == 1 else f"layers.{layer}."), size if layer else 2 * size
        shapes |= {
            f"{name}{norm}.weight": (size,)
            for norm in ("input_layernorm", "post_attention_layernorm", *(() if layer else ("hidden_norm",)))
        }
        for part, (outputs, inputs) in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, width),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width),
            "self_attn.o_proj": (size, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, size),
            "mlp.up_proj": (INNER, size),
            "mlp.down_proj": (size, INNER),
        }.items():
            shapes[f"{name}{part}.weight"] = outputs, inputs
        if settings.get("attention_bias"):
            outputs = zip("qkvo", (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, size), strict=True)
            shapes |= {f"{name}self_attn.{part}_proj.bias": (count,) for part, count in outputs}
    if not (tied := settings.get("tie_word_embeddings")):
        shapes["lm_head.weight"] = known, size
    if own_embeddings or tied:
        shapes["embed_tokens.weight"] = tokens, size
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * size,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (size,) for number in range(count)}
    random = torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        plain = len(shape) == 1 and not name.endswith("bias")
        weights[name] = noise * 0.1 + 1 if plain else noise * (1.3 / shape[-1] ** 0.5)
    if words is not None:
        weights["d2t"] = torch.arange(words) * 2
        weights["t2d"] = torch.zeros(tokens, dtype=torch.bool).index_fill_(0, torch.arange(words) * 3, value=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
