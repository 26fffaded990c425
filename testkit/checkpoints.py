"""Tiny random checkpoints of every family, in the two layouts that real ones come in.

A model with transformers' own initialisation hardly looks at its picture, so a test on it proves nothing: here matrices
are drawn from N(0, 1.3² / fan-in), embeddings from N(0, 1), norms around 1, biases around 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch

from transformers import AutoConfig, AutoModelForImageTextToText  # isort: skip

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"]
Layout = Literal["hub", "saved"]
FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families that both services serve; `qwen3_vl_moe` has the tower of `qwen3_vl`."""

TOWERS: tuple[Family, ...] = (*FAMILIES, "qwen3_5")
"""One of each tower; `qwen3_5_moe` and `qwen4_exp` have the tower of `qwen3_5`."""

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_BYTES_AND_MERGES = 586
VOCABULARY = _BYTES_AND_MERGES + len(_SPECIAL)
SPECIAL_IDS: dict[str, int] = {word: _BYTES_AND_MERGES + index for index, word in enumerate(_SPECIAL)}

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_READING = [
    "A picture shows two red circles above a blue square, and a small word below them.",
    "What is in this picture? How many shapes are there, and which colours have they?",
    "The video begins with a green triangle; after 1.5 seconds it moves to the left, then stops.",
    "You are a helpful assistant. system user assistant. Describe the image. Describe the video.",
    "Ein Bild zeigt drei gelbe Kreise. Une image montre un chat noir. Картинка с домом. 図には四角がある。",
    "Numbers such as 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10 name what is counted; <0.3 seconds> <12.0 seconds>.",
    "def read(path): return open(path).read()\n\n    # four spaces, then a tab\tand the end\n",
    "It is the same whether the prompt runs in one chunk or in many: the answer's words don't change.",
    "There is a house with a door and a window near the tree; behind it, hills and a wide sky, we've seen.",
    "Which of the shapes is the largest? The square is larger than the circle, but smaller than a triangle.",
]

_TEMPLATE = """\
{%- if default_system and (not messages or messages[0].role != 'system') -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}
{{ VIDEO }}
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_ARCHITECTURES: dict[Family, str] = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
}
_PROCESSORS: dict[Family, str] = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "qwen4_exp": "Qwen3VLProcessor",
}
_HYBRIDS = "qwen3_5", "qwen3_5_moe", "qwen4_exp"
_TIED: dict[Family, bool] = {family: family == "qwen2_vl" for family in _ARCHITECTURES}


def make_checkpoint(
    family: Family,
    directory: Path | str,
    *,
    seed: int = 0,
    sharded: bool = False,
    layout: Layout = "hub",
    tied: bool | None = None,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCABULARY,
) -> Path:
    """Writes a tiny checkpoint of `family` into `directory` and returns it; `dtype` is what its weights are stored in.
    Published models mostly have a `vocab_size` that is a multiple of 32, above their tokenizer's.

    `layout` "hub" has the files and names that the published checkpoints have (flat text fields and `visual.*` weights
    for Qwen2-VL and Qwen2.5-VL); "saved" has what transformers' `save_pretrained` writes today (nested configurations,
    one `processor_config.json`, `model.visual.*`). `tied` shares input and output embeddings; None is the family's way.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    config = _config(family, _TIED[family] if tied is None else tied)
    config.get("text_config", config)["vocab_size"] = vocab_size
    _write(root / "config.json", config)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(root), dtype=torch.float32)
    redraw(model, seed)
    _draw_generation(model)
    limit = "150KB" if sharded else "1GB"
    model.to(dtype).save_pretrained(root, max_shard_size=limit, save_original_format=layout == "hub")
    if layout == "hub":
        _write(root / "config.json", config)
    _write_processors(family, root, layout)
    _write_tokenizer(family, root, layout)
    return root


def _config(family: Family, tied: bool) -> dict[str, Any]:
    """The published form of a configuration, with tiny numbers."""
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
    }
    ids = {
        "image_token_id": SPECIAL_IDS["<|image_pad|>"],
        "video_token_id": SPECIAL_IDS["<|video_pad|>"],
        "vision_start_token_id": SPECIAL_IDS["<|vision_start|>"],
        "vision_end_token_id": SPECIAL_IDS["<|vision_end|>"],
    }
    head = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": tied,
        **ids,
    }
    if family in _HYBRIDS:
        return {**head, "text_config": text | _hybrid(family, tied), "vision_config": _vision(family)}
    if family.startswith("qwen3"):
        text |= {
            "model_type": f"{family}_text",
            "head_dim": 32,
            "num_hidden_layers": 4,
            "attention_bias": False,
            "rope_theta": 5000000.0,
            "tie_word_embeddings": tied,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        }
        if family == "qwen3_vl_moe":  # the second layer is dense
            text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
        return {**head, "text_config": text, "vision_config": _vision(family)}
    text |= {
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 3,
    }
    return {**head, **text, "torch_dtype": "float32", "vision_config": _vision(family)}


def _hybrid(family: Family, tied: bool) -> dict[str, Any]:
    """What sets Qwen3.5's decoder apart: every fourth layer attends, the others are gated delta nets."""
    text: dict[str, Any] = {
        "model_type": f"{family}_text",
        "head_dim": 64,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    if family != "qwen3_5":
        text |= {"num_experts": 6, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    if family == "qwen4_exp":  # prompts of tests are longer than what the index keeps
        text |= {"hc_count": 3, "hc_lowrank": 12, "output_gate_type": "sigmoid"}
        text |= {"indexer_n_heads": 6, "indexer_kv_heads": 1, "indexer_head_dim": 24}
        text |= {"indexer_budget": 24, "indexer_compress_ratio": 6}
        text |= {"ple_layer_ids": [1, 3], "ple_embed_dim": 48, "heads_per_ngram": 4, "ngram_vocab_size_base": 50}
        text |= {"make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 5}
    return text


def _vision(family: Family) -> dict[str, Any]:
    if family == "qwen2_vl":
        return {
            "depth": 3,
            "embed_dim": 32,
            "mlp_ratio": 2,
            "num_heads": 2,
            "in_chans": 3,
            "hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        }
    if family == "qwen2_5_vl":
        return {
            "depth": 4,
            "hidden_act": "silu",
            "hidden_size": 32,
            "intermediate_size": 52,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        }
    return {
        "model_type": family,
        "depth": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": [] if family in _HYBRIDS else [0, 2],
        "initializer_range": 0.02,
    }


def redraw(model: torch.nn.Module, seed: int) -> None:
    """Fills every parameter in place; shared ones once."""
    generator = torch.Generator().manual_seed(seed)
    around_one = {f"{name}.weight" for name, module in model.named_modules() if not _norms_by_one_plus(module)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                noise = 0.1 * noise + (1.0 if name in around_one else 0.0)
            elif "experts" in name:  # stacked [experts, out, in]
                noise *= 1.3 / parameter.shape[-1] ** 0.5
            elif not any(table in name for table in ("embed_tokens", "pos_embed", "ngram_embedding")):
                noise *= 1.3 / parameter[0].numel() ** 0.5
            parameter.copy_(noise)


def _norms_by_one_plus(module: torch.nn.Module) -> bool:
    """Whether it is a norm that multiplies by 1 + weight."""
    return type(module).__name__ in ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen4ExpTextRMSNorm")


def _draw_generation(model: Any) -> None:
    """Stops and paddings as the published checkpoints name them; the tests decode greedily."""
    model.generation_config.update(
        bos_token_id=SPECIAL_IDS["<|endoftext|>"],
        pad_token_id=SPECIAL_IDS["<|endoftext|>"],
        eos_token_id=[SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]],
        do_sample=False,
    )


def _write_processors(family: Family, root: Path, layout: Layout) -> None:
    newer = not family.startswith("qwen2")
    side, look = (32, _HALF) if newer else (28, _CLIP)
    shared = {
        **look,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "patch_size": side // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    image = {**shared, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**shared, "video_processor_type": "Qwen2VLVideoProcessor"}
    pixels = {"image": (4 * side * side, 64 * side * side), "video": (4 * side * side, 16 * side * side)}
    if newer:  # its video budget covers all frames together
        video |= {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "fps": 2,
            "min_frames": 4,
            "max_frames": 768,
        }
        pixels["video"] = (8 * side * side, 96 * side * side)
    for settings, kind in ((image, "image"), (video, "video")):
        low, high = pixels[kind]
        if family == "qwen2_vl" and layout == "hub":  # the oldest checkpoints name their bounds so
            settings |= {"min_pixels": low, "max_pixels": high}
        else:
            settings["size"] = {"shortest_edge": low, "longest_edge": high}
    name = {"processor_class": _PROCESSORS[family]}
    if layout == "saved":
        _write(root / "processor_config.json", {**name, "image_processor": image, "video_processor": video})
        return
    _write(root / "preprocessor_config.json", {**image, **name})
    _write(root / "video_preprocessor_config.json", {**video, **name})


def _write_tokenizer(family: Family, root: Path, layout: Layout) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_BYTES_AND_MERGES,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_READING, trainer)
    if tokenizer.get_vocab_size() != _BYTES_AND_MERGES:
        raise AssertionError("the text is too short for the vocabulary")
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL])
    tokenizer.save(str(root / "tokenizer.json"))
    video = "'<|vision_start|><|video_pad|><|vision_end|>'"
    template = _TEMPLATE.replace("VIDEO", video).replace("default_system", str(family.startswith("qwen2")).lower())
    added = {
        str(number): {
            "content": word,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for word, number in SPECIAL_IDS.items()
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "bos_token": None,
        "additional_special_tokens": list(_SPECIAL[1:]),
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 4096,
        "split_special_tokens": False,
    }
    if layout == "hub":
        settings["chat_template"] = template
        _write(root / "chat_template.json", {"chat_template": template})
    else:
        (root / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write(root / "tokenizer_config.json", settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
