"""Models of which some layers keep states."""

from __future__ import annotations

from typing import Any

from tools.models.recipes.recipe import IDS, TEXT, VISION, Recipe, part, processor, whole

_MARKS = ("image", "slice", "image_id")
_NAMES = {f"{mark}_{end}_token": f"<{mark}-{end}>" for mark in _MARKS for end in ("start", "end")}
_SIDE = 112
"""Pixels of a picture's side: larger ones are shown in slices as well."""


def _minicpm(kind: str, classes: str, pictures: str, **more: Any) -> Recipe:
    """Of Qwen3.5's text; pictures are shown in slices as well."""
    return Recipe(
        whole(
            kind,
            vision_config=part(f"{kind}_vision", VISION),
            text_config=part(
                "qwen3_5_text",
                {**TEXT, "num_hidden_layers": 4},
                layer_types=["linear_attention", "full_attention"] * 2,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
            ),
            insert_layer_id=1,
            **more,
            **IDS,
        ),
        processor(
            f"{classes}Processor",
            pictures,
            videos=f"{classes}VideoProcessor",
            settings={"scale_resolution": _SIDE},
        ),
        ("<video>", *_NAMES.values()),
        named={"image_token": "<image>", "video_token": "<video>", **_NAMES},
    )


RECIPES: dict[str, Recipe] = {
    "minicpmv4_6": _minicpm("minicpmv4_6", "MiniCPMV4_6", "MiniCPMV4_6ImageProcessorPil", image_size=_SIDE),
    "minicpm_ocr": _minicpm("minicpm_ocr", "MiniCPMOcr", "MiniCPMOcrImageProcessor", tie_word_embeddings=False),
}
