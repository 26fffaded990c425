"""Random checkpoints of about 225 M parameters without a family of ours, for timing only: in LLaVA's format, with a
CLIP tower and a Llama text; in Gemma 3's, Gemma 4's and Kimi K2.5's; in Molmo 2's, Phi-4 multimodal's and Gemma 3n's
with small towers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import Recipe, part, processor, whole
from tools.models.recipes.spans import gemma4_by
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
LLAVA = replace(
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


GEMMA3_TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
GEMMA3_SIDE = 448
GEMMA3 = replace(
    RECIPES["gemma3"],
    config=whole(
        "gemma3",
        vision_config=part("siglip_vision_model", {**VISION, "image_size": GEMMA3_SIDE}, vision_use_head=False),
        text_config=part("gemma3_text", GEMMA3_TEXT, sliding_window=256, query_pre_attn_scalar=256),
        mm_tokens_per_image=256,
        image_token_index="<soft>",
        boi_token_index="<image>",
        eoi_token_index="<end>",
        tie_word_embeddings=False,
    ),
    processor=processor(
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        settings={"size": {"height": GEMMA3_SIDE, "width": GEMMA3_SIDE}},
        image_seq_length=256,
    ),
)


GEMMA4_LAYERS = 15
GEMMA4 = gemma4_by(
    {**GEMMA3_TEXT, "intermediate_size": 2048, "num_hidden_layers": GEMMA4_LAYERS, "num_key_value_heads": 1},
    eyes={**VISION, "patch_size": 16, "head_dim": 64, "num_key_value_heads": VISION["num_attention_heads"]},
    pictures={"max_soft_tokens": 280, "pooling_kernel_size": 3, "patch_size": 16},
    global_head_dim=512,
    sliding_window=256,
    hidden_size_per_layer_input=128,
    num_kv_shared_layers=5,
    use_double_wide_mlp=True,
    use_bidirectional_attention=None,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * (GEMMA4_LAYERS // 5),
)
"""Shaped as the small published ones: most layers have a window of 256 tokens, a third have no keys of their own."""


KIMI_TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
}
KIMI = replace(
    RECIPES["kimi_k25"],
    config=whole(
        "kimi_k25",
        vision_config=part("kimi_k25_vision", VISION, pos_emb_height=64, pos_emb_width=64, merge_kernel_size=[2, 2]),
        text_config=part(
            "deepseek_v3",
            KIMI_TEXT,
            q_lora_rank=512,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=KIMI_TEXT["num_hidden_layers"],
        ),
        projection_hidden_size=VISION["hidden_size"],
        image_token_id="<image>",
        tie_word_embeddings=False,
    ),
    processor=processor(
        "Kimi_K25Processor",
        "Kimi_K25ImageProcessor",
        videos="Kimi_K25VideoProcessor",
        settings={"size": {"max_height": 64, "max_width": 64}, "max_patches": 4096},
    ),
)
"""Heads, and the latents that they share, are as large as the published one's; there are no experts."""


def _by_text(kind: str, **text: Any) -> Recipe:
    """A recipe with another text, beside the small towers that it has."""
    recipe = RECIPES[kind]

    def config(*given: Any) -> Any:
        made = recipe.config(*given)
        if kind == "molmo2":
            made.adapter_config.text_hidden_size = text["hidden_size"]
        for name, value in text.items():
            setattr(made.get_text_config(decoder=True), name, value)
        return made

    return replace(recipe, config=config)


MOLMO2 = _by_text("molmo2", **TEXT)
_FACTORS = [1.0 + 0.1 * pair for pair in range(24)]
PHI4 = _by_text(
    "phi4_multimodal",
    **TEXT,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
        "short_factor": _FACTORS,
        "long_factor": [2 * factor for factor in _FACTORS],
    },
)
GEMMA3N_LAYERS = 15
GEMMA3N = _by_text(
    "gemma3n",
    **{**GEMMA3_TEXT, "num_hidden_layers": GEMMA3N_LAYERS, "intermediate_size": [2048] * GEMMA3N_LAYERS},
    sliding_window=256,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * (GEMMA3N_LAYERS // 5),
    num_kv_shared_layers=5,
    hidden_size_per_layer_input=128,
    laurel_rank=64,
    activation_sparsity_pattern=[0.95] * 5 + [0.0] * (GEMMA3N_LAYERS - 5),
)
"""Shaped as the small published ones, in a third of whose layers few gates count."""


MISTRAL_LARGE4 = _by_text(
    "mistral_large4",
    hidden_size=1024,
    intermediate_size=3072,
    moe_intermediate_size=512,
    n_routed_experts=8,
    num_attention_heads=16,
    num_key_value_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    head_dim=64,
    qk_nope_head_dim=64,
    qk_head_dim=128,
    v_head_dim=128,
    index_topk=256,
    index_head_dim=128,
    index_n_heads=32,
)
"""Heads, latents and those of the index are as large as the published ones; an eighth of the tokens are chosen."""


def plain_checkpoint(recipe: Recipe, folder: Path) -> Path:
    """Makes the checkpoint of a recipe in `folder` unless it is there already."""
    if not (folder / "complete").is_file():
        make_by(recipe, folder)
        (folder / "complete").touch()
    return folder
