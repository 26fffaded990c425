"""Models that see all tokens before them, and of a picture one run of rows, or several without marks."""

from __future__ import annotations

from typing import Any

from tools.models.recipes.recipe import (
    CLIP,
    IDS,
    LLAMA,
    MEDIA,
    PATCHES,
    PINPOINTS,
    PIXELS,
    QWEN2,
    QWEN_PICTURES,
    SIDE,
    SIGLIP,
    SQUARE,
    TEXT,
    VISION,
    Recipe,
    part,
    processor,
    whole,
)

_CROPPED: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
_SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 128,
    "patch_size": 16,
    "window_size": 4,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
}

RECIPES: dict[str, Recipe] = {
    "llava": Recipe(
        whole("llava", vision_config=CLIP, text_config=LLAMA, image_token_index="<image>"),
        processor(
            "LlavaProcessor",
            "CLIPImageProcessorPil",
            settings=_CROPPED,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "llava_next": Recipe(
        whole(
            "llava_next",
            vision_config=CLIP,
            text_config=LLAMA,
            image_token_index="<image>",
            image_grid_pinpoints=PINPOINTS,
        ),
        processor(
            "LlavaNextProcessor",
            "LlavaNextImageProcessorPil",
            settings={**_CROPPED, "image_grid_pinpoints": PINPOINTS},
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "llava_next_video": Recipe(
        whole(
            "llava_next_video",
            vision_config=CLIP,
            text_config=LLAMA,
            image_token_index="<image>",
            video_token_index="<video>",
            image_grid_pinpoints=PINPOINTS,
            image_seq_length=16,
        ),
        processor(
            "LlavaNextVideoProcessor",
            "LlavaNextImageProcessorPil",
            videos="LlavaNextVideoVideoProcessor",
            settings={"size": {"shortest_edge": SIDE}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS},
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        ("<video>",),
    ),
    "llava_onevision": Recipe(
        whole(
            "llava_onevision",
            vision_config=SIGLIP,
            text_config=QWEN2,
            image_token_index="<image>",
            video_token_index="<video>",
            image_grid_pinpoints=PINPOINTS,
            vision_aspect_ratio="anyres_max_9",
            tie_word_embeddings=False,
        ),
        processor(
            "LlavaOnevisionProcessor",
            "LlavaOnevisionImageProcessorPil",
            videos="LlavaOnevisionVideoProcessor",
            settings={"size": SQUARE},
            stills={"image_grid_pinpoints": PINPOINTS},
            num_image_tokens=16,
            vision_feature_select_strategy="full",
        ),
        ("<video>",),
    ),
    "vipllava": Recipe(
        whole(
            "vipllava",
            vision_config=CLIP,
            text_config=LLAMA,
            image_token_index="<image>",
            vision_feature_layer=[-2, -1, 1],
        ),
        processor(
            "LlavaProcessor",
            "CLIPImageProcessorPil",
            settings=_CROPPED,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "video_llava": Recipe(
        whole(
            "video_llava",
            vision_config=CLIP,
            text_config=LLAMA,
            image_token_index="<image>",
            video_token_index="<video>",
            image_seq_length=16,
        ),
        processor(
            "VideoLlavaProcessor",
            "VideoLlavaImageProcessor",
            videos="VideoLlavaVideoProcessor",
            settings=_CROPPED,
        ),
        ("<video>",),
    ),
    "video_llama_3": Recipe(
        whole(
            "video_llama_3",
            vision_config=part("video_llama_3_vision", VISION),
            text_config=QWEN2,
            **IDS,
        ),
        processor(
            "VideoLlama3Processor",
            "VideoLlama3ImageProcessorPil",
            videos="VideoLlama3VideoProcessor",
            settings={"size": PIXELS, "patch_size": 14, "merge_size": 1, "temporal_patch_size": 1},
        ),
        ("<video>",),
        named=MEDIA,
    ),
    "deepseek_vl": Recipe(
        whole(
            "deepseek_vl",
            vision_config=SIGLIP,
            text_config=LLAMA,
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor("DeepseekVLProcessor", "DeepseekVLImageProcessorPil", settings={"size": SQUARE}, num_image_tokens=16),
        named={"image_token": "<image>"},
    ),
    "deepseek_vl_hybrid": Recipe(
        whole(
            "deepseek_vl_hybrid",
            vision_config=SIGLIP,
            high_res_vision_config=part("sam_vision_model", _SAM),
            text_config=LLAMA,
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor(
            "DeepseekVLHybridProcessor",
            "DeepseekVLHybridImageProcessorPil",
            settings={"size": SQUARE, "high_res_size": {"height": 128, "width": 128}},
            num_image_tokens=16,
        ),
        named={"image_token": "<image>"},
    ),
    "deepseek_ocr2": Recipe(
        whole(
            "deepseek_ocr2",
            vision_config=whole(
                "deepseek_ocr2_vision",
                sam_config=part(
                    "deepseek_ocr2_sam_vision_model", {**_SAM, "image_size": 1024}, downsample_channels=[24, 32]
                ),
                encoder_config=part("deepseek_ocr2_encoder", {**TEXT, "hidden_size": 32, "head_dim": 8}),
            ),
            text_config=part(
                "deepseek_ocr2_text",
                {**TEXT, "num_key_value_heads": 4},
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                mlp_layer_types=["dense", "sparse", "sparse"],
            ),
            image_token_id="<image>",
        ),
        processor(
            "DeepseekOcr2Processor",
            "DeepseekOcr2ImageProcessorPil",
            settings={"size": {"height": 1024, "width": 1024}, "max_patches": 2},
        ),
    ),
    "unlimited_ocr": Recipe(
        whole(
            "unlimited_ocr",
            vision_config=whole(
                "unlimited_ocr_vision",
                sam_config=part("unlimited_ocr_sam_vision_model", _SAM, downsample_channels=[24, 32]),
                encoder_config=part("unlimited_ocr_vision_encoder", VISION),
            ),
            text_config=part(
                "unlimited_ocr_text",
                {**TEXT, "num_key_value_heads": 4},
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                n_shared_experts=1,
                sliding_window=24,
            ),
            image_token_id="<image>",
        ),
        processor(
            "UnlimitedOcrProcessor",
            "UnlimitedOcrImageProcessor",
            settings={"size": {"height": 128, "width": 128}, "tile_size": 64, "max_patches": 4},
        ),
    ),
    "got_ocr2": Recipe(
        whole(
            "got_ocr2",
            vision_config=part("got_ocr2_vision", {**_SAM, "image_size": 1024}),
            text_config=QWEN2,
            image_token_index="<imgpad>",
            image_seq_length=256,
            tie_word_embeddings=False,
        ),
        processor("GotOcr2Processor", "GotOcr2ImageProcessorPil", settings={"size": {"height": 1024, "width": 1024}}),
        ("<imgpad>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"),
        image="<imgpad>",
    ),
    "pp_chart2table": Recipe(
        whole(
            "pp_chart2table",
            vision_config=part("pp_chart2table_vision", {**_SAM, "image_size": 1024}),
            text_config=QWEN2,
            image_token_index="<imgpad>",
            image_seq_length=256,
            tie_word_embeddings=False,
        ),
        processor("PPChart2TableProcessor", "PPChart2TableImageProcessorPil"),
        ("<imgpad>", "<img>", "</img>"),
        image="<imgpad>",
    ),
    "janus": Recipe(
        whole(
            "janus",
            vision_config=part("janus_vision_model", VISION, projection_dim=64, num_image_tokens=16, mlp_ratio=1.5),
            vq_config=part(
                "janus_vqgan",
                {},
                base_channels=32,
                channel_multiplier=[1, 1],
                num_embeddings=32,
                latent_channels=32,
                num_res_blocks=1,
                projection_dim=64,
                image_token_embed_dim=64,
                num_patches=4,
            ),
            text_config=LLAMA,
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor("JanusProcessor", "JanusImageProcessorPil", settings={"size": SQUARE}, num_image_tokens=16),
        ("<start>", "<end>"),
        named={"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<end>"},
    ),
    "kimi_k25": Recipe(
        whole(
            "kimi_k25",
            vision_config=part("kimi_k25_vision", VISION, pos_emb_height=8, pos_emb_width=8, merge_kernel_size=[2, 2]),
            text_config=part(
                "deepseek_v3",
                {**TEXT, "num_key_value_heads": 4},
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                first_k_dense_replace=1,
                n_shared_experts=1,
            ),
            projection_hidden_size=32,
            **IDS,
            tie_word_embeddings=False,
        ),
        processor(
            "Kimi_K25Processor",
            "Kimi_K25ImageProcessor",
            videos="Kimi_K25VideoProcessor",
            settings={"size": {"max_height": 8, "max_width": 8}, "max_patches": 40},
        ),
        ("<video>",),
        named=MEDIA,
    ),
    "aria": Recipe(
        whole(
            "aria",
            vision_config=part("idefics3_vision", {**VISION, "image_size": 980, "patch_size": 140}),
            text_config=part("aria_text", TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            projector_patch_to_query_dict=lambda *_: {49: 6},
            image_token_index="<image>",
        ),
        processor(
            "AriaProcessor", "AriaImageProcessorPil", settings={"min_image_size": 40}, size_conversion={490: 3, 980: 6}
        ),
        named={"image_token": "<image>"},
    ),
    "hyperclovax_vision_v2": Recipe(
        whole(
            "hyperclovax_vision_v2",
            vision_config=part(
                "qwen2_5_vl_vision", PATCHES, out_hidden_size=64, window_size=56, fullatt_block_indexes=[1]
            ),
            text_config=part("hyperclovax", TEXT),
            **IDS,
            tie_word_embeddings=False,
        ),
        processor(
            "HyperCLOVAXVisionV2Processor",
            "Qwen2VLImageProcessorPil",
            videos="Qwen2VLVideoProcessor",
            settings=QWEN_PICTURES,
        ),
        ("<video>",),
        named=MEDIA,
    ),
    "fuyu": Recipe(
        whole("fuyu", text_config=part("persimmon", TEXT), patch_size=14, image_token_id="|SPEAKER|"),
        processor(
            "FuyuProcessor",
            "FuyuImageProcessorPil",
            settings={"size": SQUARE, "patch_size": {"height": 14, "width": 14}},
        ),
        ("|SPEAKER|", "|NEWLINE|", "<0x04>"),
        image="|SPEAKER|",
    ),
}
