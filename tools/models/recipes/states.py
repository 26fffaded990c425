"""Models of which some layers keep states."""

from __future__ import annotations

from typing import Any

from tools.models.recipes.recipe import (
    IDS,
    MEDIA,
    QWEN_PICTURES,
    SIDE,
    SQUARE,
    TEXT,
    VISION,
    Recipe,
    part,
    processor,
    whole,
)

_MARKS = ("image", "slice", "image_id")
_NAMES = {f"{mark}_{end}_token": f"<{mark}-{end}>" for mark in _MARKS for end in ("start", "end")}
_SIDE = 112
"""Pixels of the side that a tower has places for. Pictures of more than `SIDE` are shown in slices as well."""
_NEWLINE = 198
"""The token of a line's end, of a tokenizer of bytes."""


def _minicpm(kind: str, classes: str, pictures: str, videos: str = "", **more: Any) -> Recipe:
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
            videos=videos or f"{classes}VideoProcessor",
            settings={"scale_resolution": SIDE},
        ),
        ("<video>", *_NAMES.values()),
        named={"image_token": "<image>", "video_token": "<video>", **_NAMES},
    )


RECIPES: dict[str, Recipe] = {
    "minicpmv4_6": _minicpm("minicpmv4_6", "MiniCPMV4_6", "MiniCPMV4_6ImageProcessorPil", image_size=_SIDE),
    "minicpmv4_7": _minicpm(
        "minicpmv4_7",
        "MiniCPMV4_7",
        "MiniCPMV4_6ImageProcessorPil",
        videos="MiniCPMV4_6VideoProcessor",
        image_size=_SIDE,
        **{f"{mark}_{end}_id": f"<{mark}-{end}>" for mark in _MARKS[:2] for end in ("start", "end")},
        newline_id=_NEWLINE,
    ),
    "minicpm_ocr": _minicpm("minicpm_ocr", "MiniCPMOcr", "MiniCPMOcrImageProcessor", tie_word_embeddings=False),
    "lfm2_vl": Recipe(
        whole(
            "lfm2_vl",
            vision_config=part("siglip2_vision_model", VISION, num_patches=64, vision_use_head=False),
            text_config=part("lfm2", TEXT, layer_types=["conv", "full_attention", "conv"]),
            projector_hidden_size=48,
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor(
            "Lfm2VlProcessor",
            "Lfm2VlImageProcessor",
            settings={
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "encoder_patch_size": 14,
                "tile_size": SIDE,
                "max_tiles": 4,
                "size": SQUARE,
            },
        ),
        ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        named={"image_token": "<image>"},
    ),
    "lfm3_vl": Recipe(
        whole(
            "lfm3_vl",
            vision_config=part(
                "lfm3_vl_vision",
                {**VISION, "num_attention_heads": 2, "num_key_value_heads": 1},
                layer_types=["conv", "full_attention", "conv"],
            ),
            text_config=part(
                "lfm3",
                {**TEXT, "num_hidden_layers": 4},
                layer_types=["conv", "full_attention", "sliding_attention", "conv"],
                sliding_window=24,
            ),
            projector_hidden_size=48,
            **IDS,
            vision_start_token_id="<start>",
            vision_end_token_id="<end>",
            tie_word_embeddings=False,
        ),
        processor(
            "Lfm3VlProcessor", "Qwen2VLImageProcessorPil", videos="Qwen3VLVideoProcessor", settings=QWEN_PICTURES
        ),
        ("<video>", "<start>", "<end>"),
        named={**MEDIA, "vision_start_token": "<start>", "vision_end_token": "<end>"},
        image="<start><image><end>",
        video="<start><video><end>",
    ),
}
