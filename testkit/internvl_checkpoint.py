"""Tiny random checkpoints of InternVL, with each kind of text and of tower that it comes with, with processors as
published ones have them; and what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tools.demo_media import film
from tools.models.prompts import Film, Part, picture
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import SIDE, TEXT, VISION, part, whole
from tools.models.tiny import make_by

MOST_TILES = 4
_TOWER = {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "text": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    },
    "qwen3": {"tower": {"use_qk_norm": True, "norm_type": "rms_norm"}, "tie_word_embeddings": False},
    "llama": {
        "tower": {
            "attention_bias": True,
            "use_absolute_position_embeddings": False,
            "use_mean_pooling": False,
            "use_mask_token": True,
        }
    },
}
"""By their text: what else sets them apart."""

PROMPTS: dict[str, list[Part]] = {
    "text": ["Tell me about two red circles."],
    "one small picture": [picture(1, 40, 30), "What is in the picture?"],
    "one large picture": ["See ", picture(2, 300, 290), ": what is in it?"],
    "two of different size": ["Left: ", picture(3, 64, 150), " and right: ", picture(4, 500, 60), "\n\nWhich is red?"],
    "a video": ["First this: ", Film(film()), " What moves?"],
    "a video and a picture": [Film(film()), "then", picture(5, 120, 50), "."],
}


def make_internvl(
    folder: Path,
    kind: str = "qwen2",
    *,
    layout: Literal["hub", "saved"] = "saved",
    dtype: torch.dtype = torch.float32,
    side: int = SIDE,
) -> Path:
    """Writes one with tiles of `side` pixels a side into a folder, and returns that."""
    about = KINDS[kind]
    config = whole(
        "internvl",
        vision_config=part("internvl_vision", {**_TOWER, "image_size": [side, side]}, **about.get("tower", {})),
        text_config=part(kind, TEXT, **about.get("text", {})),
        image_token_id="<image>",
        image_seq_length=(side // 28) ** 2,
        downsample_ratio=0.5,
        tie_word_embeddings=about.get("tie_word_embeddings", True),
    )
    make_by(replace(RECIPES["internvl"], config=config), folder, dtype=dtype)
    saved = json.loads((folder / "processor_config.json").read_text())
    saved["image_seq_length"] = (side // 28) ** 2
    for part_of in ("image_processor", "video_processor"):
        saved[part_of]["size"] = {"height": side, "width": side}
    pictures = saved["image_processor"]
    pictures["crop_to_patches"] = False  # as published ones say; transformers' processor cuts nevertheless
    if layout == "hub":
        saved = {"image_seq_length": saved["image_seq_length"], "processor_class": saved["processor_class"]}
        _write(folder / "preprocessor_config.json", {**pictures, **saved})
        weights = load_file(folder / "model.safetensors")
        save_file(
            {_hub_name(name): each for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"}
        )
    _write(folder / "processor_config.json", saved)
    return folder


def _hub_name(name: str) -> str:
    """As releases before 5 have saved it."""
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
