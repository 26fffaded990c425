"""Models whose layers choose the tokens that they see by an index: fewer of them here than a short prompt has."""

from __future__ import annotations

from typing import Any

from tools.models.recipes.recipe import TEXT, VISION, Recipe, part, processor, whole

_LATENTS: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}

RECIPES: dict[str, Recipe] = {
    "mistral_large4": Recipe(
        whole(
            "mistral_large4",
            vision_config=part("pixtral", {**VISION, "image_size": 112}),
            text_config=part(
                "mistral_large4_text",
                {**_LATENTS, "num_hidden_layers": 6},
                no_rope_layers=[1, 1, 1, 0, 1, 0],
                kv_source_layers=[0, 1, 1, 3, 1, 3],
                indexer_types=["full", "full", "shared", "full", "full", "shared"],
            ),
            image_token_index="<image>",
            spatial_merge_size=2,
        ),
        processor(
            "PixtralProcessor",
            "PixtralImageProcessorPil",
            settings={"size": {"longest_edge": 112}, "patch_size": 28},
            patch_size=14,
            spatial_merge_size=2,
            image_token="<image>",
            image_break_token="<break>",
            image_end_token="<end>",
        ),
        ("<break>", "<end>"),
        pieces=True,
    ),
}
