"""A tiny random checkpoint of Qwen2-Audio, which hears two seconds at a time, and what transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testkit import checkpoints, reference
from testkit.checkpoints import SPECIAL_IDS, VOCABULARY, redraw

from transformers import AutoProcessor, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration  # isort: skip

SECONDS = 2
_NAMES = {"<|box_start|>": "<|AUDIO|>", "<|quad_start|>": "<|audio_bos|>", "<|quad_end|>": "<|audio_eos|>"}
"""Special tokens of the vision models, and what they are here."""
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' -%}
{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}
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


def make_audio_checkpoint(root: Path, *, layout: checkpoints.Layout = "hub", seed: int = 0) -> Path:
    """Writes the checkpoint, as it is published ("hub") or as transformers saves it today ("saved")."""
    root.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": SPECIAL_IDS["<|box_start|>"],
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "max_source_positions": SECONDS * 50,
        },
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
            "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        },
    }
    model = Qwen2AudioForConditionalGeneration(Qwen2AudioConfig(**{k: config[k] for k in list(config)[2:]}))
    redraw(model, seed)
    model.generation_config.update(eos_token_id=SPECIAL_IDS["<|im_end|>"], do_sample=False)
    model.save_pretrained(root, save_original_format=layout == "hub")
    if layout == "hub":
        _write(root / "config.json", config)
    checkpoints._write_tokenizer("qwen2_vl", root, "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (root / name).read_text()
        for was, now in _NAMES.items():
            text = text.replace(was, now)
        (root / name).write_text(text)
    (root / "chat_template.jinja").write_text(_TEMPLATE)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "chunk_length": SECONDS,
        "n_fft": 400,
        "hop_length": 160,
        "sampling_rate": 16_000,
        "return_attention_mask": True,
    }
    name = {"processor_class": "Qwen2AudioProcessor"}
    if layout == "saved":
        _write(root / "processor_config.json", {**name, "feature_extractor": extractor})
    else:
        _write(root / "preprocessor_config.json", {**extractor, **name})
    return root


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))


@lru_cache(maxsize=4)
def processor(folder: Path) -> Any:
    """transformers'."""
    return AutoProcessor.from_pretrained(folder, local_files_only=True)


@lru_cache(maxsize=4)
def model(folder: Path) -> Any:
    """transformers', in float32."""
    loaded = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return loaded.eval()


def inputs_of(folder: Path, messages: list[dict[str, Any]], clips: Sequence[np.ndarray]) -> Any:
    """What the model takes for a chat about clips, [n] float32 each."""
    text = processor(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return processor(folder)(text=[text], audio=list(clips), sampling_rate=16_000, return_tensors="pt")


@torch.no_grad()
def rows_of(folder: Path, clip: np.ndarray) -> np.ndarray:
    """A clip's rows [n, width] float32: what the decoder is given in the places of so many placeholders."""
    extractor = processor(folder).feature_extractor
    given = extractor(clip, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    loaded = model(folder)
    seen: list[torch.Tensor] = []
    frames = int(given["attention_mask"].sum())
    ids = torch.full((1, ((frames - 1) // 2 + 1) // 2), loaded.config.audio_token_id)
    hook = loaded.model.language_model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with hook:
        loaded(
            input_ids=ids,
            input_features=given["input_features"],
            feature_attention_mask=given["attention_mask"],
            attention_mask=torch.ones_like(ids),
        )
    rows: np.ndarray = seen[0][0].numpy()
    return rows


@torch.no_grad()
def tokens_of(folder: Path, inputs: Any, count: int) -> list[int]:
    """Greedy tokens, stops ignored."""
    loaded = model(folder)
    out = loaded.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


assert reference, "which prepares transformers' import"
