"""Random checkpoints of about 250 M parameters in the formats of Qwen3-VL, Qwen3.5 and InternVL, for timing only."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.checkpoints.checkpoint import Checkpoint
from common.hardware import default_device, default_dtype
from common.rows.wire import DType
from llm_service.layers.linear.weight_dtype import W8A8
from llm_service.model_config.text import TextConfig
from testkit.checkpoints import SPECIAL_IDS, Family, make_checkpoint, redraw
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import part, processor, whole
from tools.models.tiny import make_by
from tools.models.w8a8 import to_w8a8

from transformers import AutoConfig, AutoModelForImageTextToText  # isort: skip

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "twinlens" / "bench-250m"
"""Where it is kept from one run to the next."""

BLOCK = 16
"""Tokens of a KV block, as services have it by default."""

TEXT: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
VISION: dict[str, Any] = {
    "depth": 12,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_heads": 6,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [3, 6, 9],
}
HYBRID: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
"""Three layers of four are gated delta nets, as in Qwen3.5."""
_TEXTS: dict[str, dict[str, Any]] = {"qwen3_vl": TEXT, "qwen3_5": HYBRID}
INTERNVL = "internvl"
PIXELS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--architecture` and `--weights`."""
    parser.add_argument("--model", type=Path, help="checkpoint folder; by default a random one of 250 M parameters")
    parser.add_argument(
        "--architecture", choices=(*_TEXTS, INTERNVL), default="qwen3_vl", help="architecture of the random one"
    )
    parser.add_argument(
        "--weights",
        choices=("float32", "bfloat16", W8A8),
        default="float32",
        help="type of the random weights; models are published in bfloat16, some in w8a8 (8 bits)"
        " to be multiplied with inputs of as many",
    )


def chosen_model(given: argparse.Namespace) -> Path:
    """The checkpoint that the options name, made if it is not there."""
    folder: Path | None = given.model
    if folder is not None:
        return folder
    short = given.weights == W8A8
    if short and given.architecture != "qwen3_vl":
        raise SystemExit("--weights w8a8 is for the architecture qwen3_vl")
    dtype = "bfloat16" if short else given.weights
    make = tiled_checkpoint if given.architecture == INTERNVL else partial(bench_checkpoint, family=given.architecture)
    folder = make(CACHE.with_name(f"{CACHE.name}-{given.architecture}-{dtype}"), getattr(torch, dtype))
    return rounded_checkpoint(folder) if short else folder


def rounded_checkpoint(source: Path) -> Path:
    """The same as W8A8 checkpoints are, beside it."""
    folder = source.with_name(f"{source.name}-{W8A8}")
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        (to_w8a8(source, folder) / "complete").touch()
    return folder


def ordinary_tokens(checkpoint: Checkpoint) -> list[int]:
    """Ids of all tokens but those that stand for media, roles and the like, which the tokenizer has apart."""
    added = json.loads(checkpoint.text("tokenizer.json") or "{}").get("added_tokens", ())
    special = {token["id"] for token in added}
    return [id for id in range(TextConfig.of(checkpoint.config).vocab_size) if id not in special]


def tiled_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    """The same in the format of InternVL, with the tower's layers and the text of the others, and tiles of 448 pixels
    as published ones have them; its vocabulary is one of bytes."""
    if (folder / "complete").is_file():
        return folder
    tower = {"num_hidden_layers": VISION["depth"], "num_attention_heads": VISION["num_heads"]}
    text = {name: value for name, value in TEXT.items() if name not in ("vocab_size", "rope_scaling")}
    config = whole(
        "internvl",
        vision_config=part("internvl_vision", {**VISION, **tower}, image_size=[448, 448], patch_size=[14, 14]),
        text_config=part("qwen3", text),
        image_token_id="<image>",
        image_seq_length=256,
    )
    size = {"size": {"height": 448, "width": 448}}
    kinds = "InternVLProcessor", "GotOcr2ImageProcessorPil"
    made = processor(*kinds, videos="InternVLVideoProcessor", settings=size, image_seq_length=256)
    make_by(replace(RECIPES["internvl"], config=config, processor=made), folder, dtype=dtype)
    (folder / "complete").touch()
    return folder


def bench_checkpoint(folder: Path, dtype: torch.dtype, family: Family = "qwen3_vl") -> Path:
    """Makes the checkpoint in `folder` unless it is there already: about 1 GB in float32, half of it in 16 bits."""
    if (folder / "complete").is_file():
        return folder
    make_checkpoint(family, folder)  # the tokenizer, the template and the processors' files
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= _TEXTS[family]
    config["vision_config"] |= VISION | ({} if family == "qwen3_vl" else {"deepstack_visual_indexes": []})
    config["tie_word_embeddings"] = True
    _write(folder / "config.json", config)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        _write(folder / name, {**json.loads((folder / name).read_text()), "size": PIXELS})
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    redraw(model, seed=0)
    model.generation_config.update(eos_token_id=SPECIAL_IDS["<|im_end|>"], do_sample=False)
    model.to(dtype).save_pretrained(folder, max_shard_size="10GB")
    _write(folder / "config.json", config)
    (folder / "complete").touch()
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def block_bytes(folder: Path) -> int:
    """Bytes of a KV block of the checkpoint's text, computed in the services' own type."""
    checkpoint = Checkpoint(folder)
    config, dtype = TextConfig.of(checkpoint.config), DType(default_dtype(default_device(), checkpoint))
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize * BLOCK
