"""Models of which some layers see a window."""

from __future__ import annotations

from tools.models.recipes.recipe import (
    IDS,
    MEDIA,
    MROPE,
    PATCHES,
    QWEN_PICTURES,
    SIDE,
    SIGLIP,
    SQUARE,
    TEXT,
    VISION,
    WINDOWED,
    Recipe,
    part,
    processor,
    whole,
)

_MUSE_WORDS = (
    "<|patch|>",
    "<|video|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|vid_frame_separator|>",
    "<|vid_start|>",
    "<|vid_end|>",
)

RECIPES: dict[str, Recipe] = {
    "aya_vision": Recipe(
        whole(
            "aya_vision",
            vision_config=SIGLIP,
            text_config=part("cohere2", TEXT, sliding_window=24, layer_types=WINDOWED),
            image_token_index="<patch>",
            downsample_factor=2,
            adapter_layer_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
        processor(
            "AyaVisionProcessor",
            "GotOcr2ImageProcessorPil",
            settings={"size": SQUARE, "crop_to_patches": True, "max_patches": 4},
            patch_size=14,
            img_size=SIDE,
            downsample_factor=2,
            image_token="<image>",
            start_of_img_token="<start>",
            end_of_img_token="<end>",
            img_patch_token="<patch>",
        ),
        ("<start>", "<end>", "<patch>"),
    ),
    "cohere2_vision": Recipe(
        whole(
            "cohere2_vision",
            vision_config=SIGLIP,
            text_config=part(
                "cohere2",
                TEXT,
                sliding_window=24,
                layer_types=WINDOWED,
            ),
            downsample_factor=2,
            alignment_intermediate_size=64,
            image_token_id="<patch>",
            tie_word_embeddings=False,
        ),
        processor(
            "Cohere2VisionProcessor",
            "Cohere2VisionImageProcessor",
            settings={"size": SQUARE, "max_patches": 3, "patch_size": 2},
        ),
        ("<patch>", "<start>", "<end>", "<break>"),
        named={
            "image_token": "<patch>",
            "boi_token": "<start>",
            "eoi_token": "<end>",
            "img_line_break_token": "<break>",
        },
        image="<patch>",
    ),
    "cohere_compass": Recipe(
        whole(
            "cohere_compass",
            vision_config=part(
                "cohere_compass_vision",
                PATCHES,
                out_hidden_size=64,
                num_position_embeddings=64,
                deepstack_visual_indexes=[0, 1],
            ),
            text_config=part(
                "cohere_compass_text",
                TEXT,
                sliding_window=24,
                layer_types=WINDOWED,
                logit_scale=0.25,
                rope_parameters=lambda *_: {"sliding_attention": dict(MROPE), "full_attention": None},
            ),
            image_token_id="<|IMAGE_PAD|>",
            video_token_id="<|VIDEO_PAD|>",
            vision_start_token_id="<|VISION_START|>",
            vision_end_token_id="<|VISION_END|>",
        ),
        processor(
            "CohereCompassProcessor",
            "CohereCompassImageProcessorPil",
            videos="CohereCompassVideoProcessor",
            settings=QWEN_PICTURES,
        ),
        ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>"),
        image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        video="<|VISION_START|><|VIDEO_PAD|><|VISION_END|>",
    ),
    "exaone4_5": Recipe(
        whole(
            "exaone4_5",
            vision_config=part(
                "exaone4_5_vision",
                PATCHES,
                num_key_value_heads=1,
                out_hidden_size=64,
                window_size=56,
                fullatt_block_indexes=[1],
            ),
            text_config=part(
                "exaone4",
                TEXT,
                sliding_window=24,
                layer_types=WINDOWED,
            ),
            **IDS,
        ),
        processor(
            "Exaone4_5_Processor", "Qwen2VLImageProcessorPil", videos="Qwen2VLVideoProcessor", settings=QWEN_PICTURES
        ),
        ("<video>",),
        named=MEDIA,
    ),
    "muse_glimmer": Recipe(
        whole(
            "muse_glimmer",
            vision_config=part(
                "muse_glimmer_vision", VISION, pos_emb_height=8, pos_emb_width=8, max_position_embeddings=64
            ),
            text_config=part("muse_glimmer_text", TEXT, sliding_window=24, output_multiplier=1.0),
            image_token_id="<|patch|>",
            video_token_id="<|video|>",
            out_hidden_size=128,
            projector_hidden_size=48,
        ),
        processor(
            "MuseGlimmerProcessor",
            "MuseGlimmerImageProcessor",
            videos="MuseGlimmerVideoProcessor",
            settings={"max_image_tokens": 24},
        ),
        _MUSE_WORDS,
        image="<|patch|>",
        video="<|video|>",
    ),
    "muse_spark": Recipe(
        whole(
            "muse_spark",
            vision_config=part(
                "muse_spark_vision", VISION, pos_emb_height=8, pos_emb_width=8, max_position_embeddings=64
            ),
            text_config=part(
                "muse_spark_text",
                TEXT,
                sliding_window=24,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                moe_hidden_size=48,
            ),
            image_token_id="<|patch|>",
            video_token_id="<|video|>",
            audio_token_id="<|audio|>",
            audio_config=part(
                "muse_spark_audio",
                {},
                patch_sizes=[48, 40],
                hidden_sizes=[16, 32],
                depths=[1, 1],
                num_hidden_layers=2,
                out_hidden_size=64,
            ),
            out_hidden_size=128,
            projector_hidden_size=48,
        ),
        processor(
            "MuseSparkProcessor",
            "MuseGlimmerImageProcessor",
            videos="MuseGlimmerVideoProcessor",
            settings={"max_image_tokens": 24},
            sounds="MuseSparkFeatureExtractor",
        ),
        (*_MUSE_WORDS, "<|audio|>", "<|soft_audio_start|>", "<|soft_audio_end|>"),
        image="<|patch|>",
        video="<|video|>",
        audio="<|audio|>",
    ),
    "llama4": Recipe(
        whole(
            "llama4",
            vision_config=part(
                "llama4_vision_model",
                {**VISION, "intermediate_size": 128},
                projector_input_dim=48,
                projector_output_dim=48,
                vision_output_dim=48,
            ),
            text_config=part(
                "llama4_text",
                TEXT,
                intermediate_size_mlp=80,
                num_local_experts=4,
                interleave_moe_layer_step=2,
                no_rope_layer_interval=2,
                attention_chunk_size=24,
                floor_scale=16,
                attn_scale=0.5,
            ),
            image_token_index="<|patch|>",
        ),
        processor("Llama4Processor", "Llama4ImageProcessor", settings={"size": SQUARE, "max_patches": 4}),
        (
            "<|image|>",
            "<|patch|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        image="<|image|>",
    ),
}
