"""Models whose rows of a picture see each other, or all tokens of a prompt with one do."""

from __future__ import annotations

from typing import Any

from tools.models.recipes.recipe import SIDE, SIGLIP, SQUARE, TEXT, VISION, WINDOWED, Recipe, part, processor, whole

_GEMMA4_WORDS = ("<soft>", "<start>", "<end>", "<|video|>", "<sound>", "<sound-start>", "<sound-end>")
_GEMMA4_NAMES = {
    "boi_token": "<start>",
    "eoi_token": "<end>",
    "image_token": "<soft>",
    "audio_token": "<sound>",
    "boa_token": "<sound-start>",
    "eoa_token": "<sound-end>",
}


_PLACES = 1024 + 128
"""Tokens that PaliGemma's processor adds to a tokenizer."""


def _paligemma(text: Any) -> Recipe:
    """Of one text or another; the processor sets tokens into prompts, whose tokens all see each other."""
    made = whole(
        "paligemma",
        vision_config=SIGLIP,
        text_config=text,
        image_token_index="<image>",
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=False,
    )
    return Recipe(
        lambda words, vocabulary: made(words, vocabulary + _PLACES),
        processor(
            "PaliGemmaProcessor",
            "SiglipImageProcessorPil",
            settings={"size": SQUARE},
            stills={"image_seq_length": 16},
        ),
        step_tokens=160,
    )


PALIGEMMA_2 = _paligemma(
    part(
        "gemma2",
        {**TEXT, "num_hidden_layers": 4},
        sliding_window=24,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
)
"""Of the same `model_type`, by another text: with windows and soft caps."""


_MOLMO2_WORDS = (
    *("<|image|>", "<|video|>", "<im_patch>", "<im_col>", "<im_start>"),
    *("<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>", "<im_low>"),
)
_GEMMA4_EARS = part(
    "gemma4_audio",
    {},
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    subsampling_conv_channels=[128, 4],
    output_proj_dims=48,
)


_GEMMA4_EYES: dict[str, Any] = {**VISION, "patch_size": 8, "head_dim": 16, "num_key_value_heads": 2}
_GEMMA4_PICTURES: dict[str, Any] = {"max_soft_tokens": 70, "pooling_kernel_size": 2, "patch_size": 8}


def gemma4_by(
    sizes: dict[str, Any],
    *,
    hears: bool = False,
    eyes: dict[str, Any] = _GEMMA4_EYES,
    pictures: dict[str, Any] = _GEMMA4_PICTURES,
    **own: Any,
) -> Recipe:
    """Of a text of these sizes, and of what is its own: its published ones have inputs of single layers, or larger
    heads without values in layers without a window, or experts besides. Those that hear let no rows see each other."""
    usual: dict[str, Any] = {
        "global_head_dim": 32,
        "sliding_window": 24,
        "vocab_size_per_layer_input": lambda _, vocabulary: vocabulary,
        "use_bidirectional_attention": None if hears else "vision",
        "final_logit_softcapping": 30.0,
    }
    pooled = pictures["pooling_kernel_size"]
    return Recipe(
        whole(
            "gemma4",
            vision_config=part("gemma4_vision", eyes, position_embedding_size=64, pooling_kernel_size=pooled),
            text_config=part("gemma4_text", sizes, **usual | own),
            audio_config=_GEMMA4_EARS if hears else None,
            image_token_id="<soft>",
            video_token_id="<|video|>",
            boi_token_id="<start>",
            eoi_token_id="<end>",
            audio_token_id="<sound>",
            tie_word_embeddings=False,
        ),
        processor(
            "Gemma4Processor",
            "Gemma4ImageProcessorPil",
            videos="Gemma4VideoProcessor",
            frames={"num_frames": 8},
            settings=pictures,
            sounds="Gemma4AudioFeatureExtractor",
        ),
        _GEMMA4_WORDS,
        named=_GEMMA4_NAMES,
        image="<soft>",
        video="<|video|>",
        audio="<sound>",
        step_tokens=pictures["max_soft_tokens"] + 10,
    )


_DENSE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "layer_types": WINDOWED,
}
GEMMA4_DENSE = gemma4_by(TEXT, **_DENSE)
GEMMA4_EXPERTS = gemma4_by(
    TEXT, **_DENSE, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=40
)
"""Of the same `model_type`: both have keys that are values before they are normed."""
_SMALLER: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "layer_types": WINDOWED * 2,
}
GEMMA4_HEARING = gemma4_by({**TEXT, "num_hidden_layers": 6}, hears=True, **_SMALLER)

RECIPES: dict[str, Recipe] = {
    "paligemma": _paligemma(part("gemma", TEXT)),
    "gemma3": Recipe(
        whole(
            "gemma3",
            vision_config=SIGLIP,
            text_config=part(
                "gemma3_text",
                {**TEXT, "num_hidden_layers": 4},
                sliding_window=24,
                sliding_window_pattern=2,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            mm_tokens_per_image=16,
            image_token_index="<soft>",
            boi_token_index="<image>",
            eoi_token_index="<end>",
            tie_word_embeddings=False,
        ),
        processor("Gemma3Processor", "Gemma3ImageProcessorPil", settings={"size": SQUARE}, image_seq_length=16),
        ("<soft>", "<end>"),
        named={"boi_token": "<image>", "eoi_token": "<end>", "image_token": "<soft>"},
    ),
    "shieldgemma2": Recipe(
        whole(
            "shieldgemma2",
            vision_config=SIGLIP,
            text_config=part(
                "gemma3_text",
                {**TEXT, "num_hidden_layers": 4},
                sliding_window=24,
                sliding_window_pattern=2,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            mm_tokens_per_image=16,
            image_token_index="<soft>",
            boi_token_index="<image>",
            eoi_token_index="<end>",
            tie_word_embeddings=False,
        ),
        processor("ShieldGemma2Processor", "Gemma3ImageProcessorPil", settings={"size": SQUARE}, image_seq_length=16),
        ("<soft>", "<end>"),
        named={"boi_token": "<image>", "eoi_token": "<end>", "image_token": "<soft>"},
    ),
    "gemma4": gemma4_by({**TEXT, "num_hidden_layers": 6}, **_SMALLER),
    "molmo2": Recipe(
        whole(
            "molmo2",
            vision_config=part(
                "molmo2_vision",
                {**VISION, "image_size": [SIDE, SIDE]},
                num_key_value_heads=2,
                head_dim=16,
            ),
            adapter_config=part(
                "molmo2_adapter",
                {**VISION, "intermediate_size": 96},
                num_key_value_heads=2,
                head_dim=16,
                vision_feature_layer=[2, 1],
                text_hidden_size=64,
            ),
            text_config=part("molmo2_text", TEXT, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
            image_patch_id="<im_patch>",
            image_start_token_id="<im_start>",
            low_res_image_start_token_id="<low_res_im_start>",
            image_end_token_id="<im_end>",
            frame_start_token_id="<frame_start>",
            frame_end_token_id="<frame_end>",
            tie_word_embeddings=False,
        ),
        processor(
            "Molmo2Processor",
            "Molmo2ImageProcessor",
            videos="Molmo2VideoProcessor",
            settings={"size": SQUARE},
            stills={"max_crops": 4, "overlap_margins": [1, 1]},
        ),
        _MOLMO2_WORDS,
        begins=False,
        image="<|image|>",
        video="<|video|>",
        step_tokens=160,
    ),
    "gemma4_unified": Recipe(
        whole(
            "gemma4_unified",
            vision_config=part(
                "gemma4_unified_vision",
                {},
                patch_size=8,
                pooling_kernel_size=2,
                mm_embed_dim=48,
                mm_posemb_size=64,
                output_proj_dims=48,
            ),
            text_config=part(
                "gemma4_unified_text",
                {**TEXT, "num_hidden_layers": 6},
                global_head_dim=32,
                sliding_window=24,
                use_bidirectional_attention="vision",
                layer_types=WINDOWED * 2,
            ),
            audio_config=None,
            image_token_id="<soft>",
            video_token_id="<|video|>",
            boi_token_id="<start>",
            eoi_token_id="<end>",
            audio_token_id="<sound>",
            tie_word_embeddings=False,
        ),
        processor(
            "Gemma4UnifiedProcessor",
            "Gemma4UnifiedImageProcessor",
            videos="Gemma4UnifiedVideoProcessor",
            frames={"num_frames": 8},
            settings={"max_soft_tokens": 70, "pooling_kernel_size": 2, "patch_size": 8},
            sounds="Gemma4UnifiedAudioFeatureExtractor",
        ),
        _GEMMA4_WORDS,
        named=_GEMMA4_NAMES,
        image="<soft>",
        video="<|video|>",
        step_tokens=80,
    ),
}
