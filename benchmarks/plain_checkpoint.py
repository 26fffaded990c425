"""A random checkpoint of about 225 M parameters in LLaVA's format, which no family of ours is for: a tower of CLIP's
form and a text of Llama's. Its words mean nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import part, processor, whole
from tools.models.tiny import make_by

SIDE, PATCH = 336, 14
TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
VISION: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_LLAVA = replace(
    RECIPES["llava"],
    config=whole(
        "llava",
        vision_config=part("clip_vision_model", VISION, projection_dim=32),
        text_config=part("llama", TEXT),
        image_token_index="<image>",
    ),
    processor=processor(
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ),
)


def plain_checkpoint(folder: Path) -> Path:
    """Makes the checkpoint in `folder` unless it is there already."""
    if not (folder / "complete").is_file():
        make_by(_LLAVA, folder)
        (folder / "complete").touch()
    return folder
