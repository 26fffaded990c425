"""Models whose layers choose the tokens that they see by an index: fewer of them here than a short prompt has."""

from __future__ import annotations

from typing import Any

from tools.models.recipes.recipe import (
    MEDIA,
    PATCHES,
    QWEN_PICTURES,
    SIDE,
    TEXT,
    VISION,
    Recipe,
    part,
    processor,
    whole,
)

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
_BANDS = 16

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
    "dots3_note": Recipe(
        whole(
            "dots3_note",
            vision_config=part(
                "dots3_note_vision_encoder",
                {**VISION, "image_size": None},
                mlp_layer_types=["dense", "dense", "sparse"],
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                adapter_in_dim=32,
                adapter_out_dim=64,
            ),
            audio_config=part(
                "dots3_note_audio_encoder",
                {**VISION, "hidden_size": 32},
                feature_size=_BANDS,
                downsample_hidden_size=12,
                adapter_input_size=32,
                adapter_out_dim=64,
            ),
            text_config=part(
                "dots3_note_text",
                {**_LATENTS, "num_hidden_layers": 4},
                q_lora_rank=20,
                first_k_dense_replace=1,
                shared_experts_intermediate_size=40,
                sliding_window=10,
                swa_num_attention_heads=2,
                swa_num_key_value_heads=2,
                swa_q_lora_rank=12,
                swa_kv_lora_rank=28,
                swa_head_dim=20,
                swa_qk_nope_head_dim=12,
                swa_v_head_dim=8,
            ),
            image_token_id="<|imgpad|>",
            video_token_id="<|video_pad|>",
            audio_token_id="<|audio_comp_pad|>",
        ),
        processor(
            "Dots3NoteProcessor",
            "Qwen2VLImageProcessorPil",
            videos="Qwen3VLVideoProcessor",
            sounds="Dots3NoteFeatureExtractor",
            bands={"feature_size": _BANDS},
            stills=QWEN_PICTURES | {"temporal_patch_size": 1},
            frames=QWEN_PICTURES | {"temporal_patch_size": 1},
        ),
        ("<|imgpad|>", "<|video_pad|>", "<|audio_comp_pad|>"),
        image="<|imgpad|>",
        video="<|video_pad|>",
        audio="<|audio_comp_pad|>",
    ),
    "glm5_next": Recipe(
        whole(
            "glm5_next",
            vision_config=part("glm5_next_vision", PATCHES, image_size=SIDE, out_hidden_size=64, intermediate_size=48),
            text_config=part(
                "glm5_next_text",
                {**_LATENTS, "num_hidden_layers": 5},
                q_lora_rank=20,
                qk_rope_head_dim=0,
                layer_types=[
                    "linear_attention",
                    "indexed_attention",
                    "indexed_attention",
                    "linear_attention",
                    "indexed_attention",
                ],
                indexer_types=["full", "full", "shared", "full", "full"],
                index_kpool=4,
                linear_num_heads=4,
                linear_head_dim=12,
                hc_mult=3,
                mlp_layer_types=["dense", "sparse", "dense", "sparse", "sparse"],
            ),
            image_token_id="<image>",
            video_token_id="<video>",
            image_start_token_id="<|begin_of_image|>",
            image_end_token_id="<|end_of_image|>",
            video_start_token_id="<|begin_of_video|>",
            video_end_token_id="<|end_of_video|>",
        ),
        processor(
            "Glm5NextProcessor", "Glm5NextImageProcessorPil", videos="Glm5NextVideoProcessor", settings=QWEN_PICTURES
        ),
        ("<video>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        named=MEDIA,
        image="<|begin_of_image|><image><|end_of_image|>",
        video="<|begin_of_video|><video><|end_of_video|>",
    ),
}
