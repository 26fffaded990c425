"""Checkpoints of transformers' kinds with towers of one size, 12 layers of 12 heads of 64, and tiny texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import Recipe, part, processor
from tools.models.recipes.spans import gemma4_by

SIDE = 448
_EYES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIDE,
    "patch_size": 14,
}
_PACKED = {"hidden_size": 768, "intermediate_size": 2048, "depth": 12, "num_heads": 12, "patch_size": 14}
_SQUARE = {"height": SIDE, "width": SIDE}
_SIGLIP = part("siglip_vision_model", _EYES, vision_use_head=False)


def _with(kind: str, pictures: str, eyes: Any, settings: Mapping[str, Any], videos: str = "", **more: Any) -> Recipe:
    """The recipe of a kind with another tower, what its processor has of its own, and settings of that of pictures."""
    recipe = RECIPES[kind]
    beside = {**more, **more.get("stills", {})}

    def config_of(*given: Any) -> Any:
        made = recipe.config(*given)
        made.vision_config = eyes(*given)
        if hasattr(made.vision_config, "out_hidden_size"):
            made.get_text_config(decoder=True).hidden_size = made.vision_config.out_hidden_size
        for name in ("mm_tokens_per_image", "image_seq_length", "image_grid_pinpoints"):
            if name in beside:
                setattr(made, name, beside[name])
        return made

    own = {name: value for name, value in more.items() if name != "mm_tokens_per_image"}
    return replace(
        recipe, config=config_of, processor=processor(*pictures.split(), videos=videos, settings=settings, **own)
    )


TOWERS: dict[str, Recipe] = {
    "internvl": _with(
        "internvl",
        "InternVLProcessor GotOcr2ImageProcessorPil",
        part("internvl_vision", {**_EYES, "image_size": [SIDE] * 2, "patch_size": [14, 14]}),
        {"size": _SQUARE},
        "InternVLVideoProcessor",
        image_seq_length=256,
    ),
    "gemma3": _with(
        "gemma3",
        "Gemma3Processor Gemma3ImageProcessorPil",
        _SIGLIP,
        {"size": _SQUARE},
        image_seq_length=256,
        mm_tokens_per_image=256,
    ),
    "gemma4": gemma4_by(
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
        | {"num_key_value_heads": 2, "max_position_embeddings": 4096},
        eyes={**_EYES, "patch_size": 16, "head_dim": 64, "num_key_value_heads": _EYES["num_attention_heads"]},
        pictures={"max_soft_tokens": 280, "pooling_kernel_size": 3, "patch_size": 16},
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
    ),
    "llava_onevision": _with(
        "llava_onevision",
        "LlavaOnevisionProcessor LlavaOnevisionImageProcessorPil",
        _SIGLIP,
        {"size": _SQUARE},
        "LlavaOnevisionVideoProcessor",
        stills={"image_grid_pinpoints": [[SIDE, 2 * SIDE]]},
        num_image_tokens=1024,
        vision_feature_select_strategy="full",
    ),
    "glm4v": _with(
        "glm4v",
        "Glm4vProcessor Glm4vImageProcessorPil",
        part("glm4v_vision", _PACKED, image_size=SIDE, out_hidden_size=2048),
        {"size": {"shortest_edge": 112 * 112, "longest_edge": 4 * SIDE * SIDE}}
        | {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
        "Glm4vVideoProcessor",
    ),
}
