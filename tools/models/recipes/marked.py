"""Models with marks between the rows of a picture."""

from __future__ import annotations

from tools.models.recipes.recipe import (
    LLAMA,
    PIXELS,
    QWEN2,
    QWEN3,
    SIDE,
    SQUARE,
    TEXT,
    VISION,
    WINDOWED,
    Recipe,
    part,
    processor,
    whole,
)

_BICUBIC = 3
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

RECIPES: dict[str, Recipe] = {
    "mistral3": Recipe(
        whole(
            "mistral3",
            vision_config=part("pixtral", {**VISION, "image_size": 112}),
            text_config=part("mistral", TEXT, sliding_window=None),
            image_token_index="<image>",
            spatial_merge_size=2,
            vision_feature_layer=-1,
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
    "lighton_ocr": Recipe(
        whole(
            "lighton_ocr",
            vision_config=part("pixtral", {**VISION, "image_size": 112}),
            text_config=QWEN3,
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor(
            "LightOnOcrProcessor",
            "PixtralImageProcessorPil",
            settings={"size": {"longest_edge": 112}, "patch_size": 28},
        ),
        ("<break>", "<end>"),
        named={"image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<end>"},
    ),
    "idefics2": Recipe(
        whole(
            "idefics2",
            vision_config=part("idefics2_vision", {**VISION, "image_size": 112}),
            perceiver_config=part(
                "idefics2_perceiver",
                {},
                hidden_size=64,
                resampler_n_latents=6,
                resampler_depth=1,
                resampler_n_heads=4,
                resampler_head_dim=16,
                num_key_value_heads=2,
            ),
            text_config=part("mistral", TEXT, sliding_window=None),
            image_token_id="<image>",
        ),
        processor(
            "Idefics2Processor",
            "Idefics2ImageProcessorPil",
            settings={"size": {"shortest_edge": 42, "longest_edge": 112}},
            image_seq_len=6,
        ),
        ("<fake_token_around_image>", "<end_of_utterance>"),
    ),
    "idefics3": Recipe(
        whole(
            "idefics3",
            vision_config=part("idefics3_vision", VISION),
            text_config=LLAMA,
            image_token_id="<image>",
            scale_factor=2,
        ),
        processor(
            "Idefics3Processor",
            "Idefics3ImageProcessorPil",
            settings={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": SIDE}, "resample": _BICUBIC},
            image_seq_len=4,
        ),
        ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_ROWS),
    ),
    "smolvlm": Recipe(
        whole(
            "smolvlm",
            vision_config=part("smolvlm_vision", VISION),
            text_config=LLAMA,
            image_token_id="<image>",
            scale_factor=2,
        ),
        processor(
            "SmolVLMProcessor",
            "SmolVLMImageProcessorPil",
            videos="SmolVLMVideoProcessor",
            settings={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": SIDE}},
            image_seq_len=4,
        ),
        ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<video>", *_ROWS),
    ),
    "granite_docling": Recipe(
        whole(
            "granite_docling",
            vision_config=part(
                "granite_docling_vision", VISION, scale_factor=2, out_hidden_size=64, deepstack_visual_indexes=[0, 1]
            ),
            text_config=part(
                "granite_docling_text",
                TEXT,
                embedding_multiplier=0.5,
                logits_scaling=4.0,
                residual_multiplier=0.8,
                attention_multiplier=0.3,
            ),
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor(
            "GraniteDoclingProcessor",
            "GraniteDoclingImageProcessorPil",
            settings={"size": SQUARE, "max_patches": 4},
            image_seq_len=4,
        ),
        ("<fake_token_around_image>", "<global-img>", *_ROWS),
        named={"image_token": "<image>"},
    ),
    "internvl": Recipe(
        whole(
            "internvl",
            vision_config=part(
                "internvl_vision",
                {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]},
                use_absolute_position_embeddings=True,
            ),
            text_config=QWEN2,
            image_token_id="<image>",
            image_seq_length=4,
            downsample_ratio=0.5,
        ),
        processor(
            "InternVLProcessor",
            "GotOcr2ImageProcessorPil",
            videos="InternVLVideoProcessor",
            settings={"size": SQUARE},
            stills={"crop_to_patches": True, "max_patches": 4},
            image_seq_length=4,
        ),
        ("<start>", "<end>", "<video>"),
        named={
            "start_image_token": "<start>",
            "end_image_token": "<end>",
            "context_image_token": "<image>",
            "video_token": "<video>",
        },
    ),
    "qianfan_ocr": Recipe(
        whole(
            "qianfan_ocr",
            vision_config=part("qianfan_ocr_vision", {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]}),
            text_config=QWEN3,
            image_token_id="<patch>",
            image_seq_length=4,
            downsample_ratio=0.5,
        ),
        processor(
            "QianfanOCRProcessor",
            "GotOcr2ImageProcessorPil",
            settings={"size": SQUARE, "crop_to_patches": True, "max_patches": 4},
            image_seq_length=4,
        ),
        ("<start>", "<end>", "<patch>"),
        named={"start_image_token": "<start>", "end_image_token": "<end>", "context_image_token": "<patch>"},
    ),
    "ovis2": Recipe(
        whole(
            "ovis2",
            vision_config=part("ovis2_vision", VISION, vocab_size=40, hidden_stride=2, num_visual_indicator_tokens=5),
            text_config=QWEN2,
            image_token_id="<IMG_ATOM>",
            visual_indicator_token_ids=["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
            vocab_size=lambda _, vocabulary: vocabulary,
            hidden_size=64,
            tie_word_embeddings=False,
        ),
        processor(
            "Ovis2Processor",
            "Ovis2ImageProcessorPil",
            settings={"size": SQUARE, "crop_to_patches": True, "max_patches": 3},
            image_seq_length=4,
        ),
        ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    ),
    "step3p7": Recipe(
        whole(
            "step3p7",
            vision_config=part(
                "step3p5_vision", {**VISION, "image_size": 112}, mlp_ratio=1.5, max_position_embeddings=64
            ),
            text_config=part(
                "step3p5",
                TEXT,
                sliding_window=24,
                layer_types=WINDOWED,
                num_local_experts=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                share_expert_dim=32,
                mlp_layer_types=["dense", "sparse", "sparse"],
            ),
            image_token_id="<im_patch>",
        ),
        processor("Step3p7Processor", "Step3p7ImageProcessor", settings={"size": {"height": 112, "width": 112}}),
        ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        image="<im_patch>",
    ),
    "minimax_m3_vl": Recipe(
        whole(
            "minimax_m3_vl",
            vision_config=part("minimax_m3_vl_vision", {**VISION, "num_attention_heads": 2}),
            text_config=part(
                "minimax_m3_vl_text",
                TEXT,
                num_local_experts=4,
                num_experts_per_tok=2,
                dense_intermediate_size=96,
                shared_intermediate_size=32,
                rotary_dim=8,
                layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                index_n_heads=2,
                index_head_dim=16,
                index_block_size=8,
                index_topk_blocks=2,
            ),
            image_token_index="]<]image[>[",
            video_token_index="]<]video[>[",
            projector_hidden_size=48,
        ),
        processor(
            "MiniMaxM3VLProcessor",
            "MiniMaxM3VLImageProcessor",
            videos="MiniMaxM3VLVideoProcessor",
            settings={"size": PIXELS},
        ),
        ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        image="]<]image[>[",
        video="]<]video[>[",
    ),
}
