"""Models that count places on three axes."""

from __future__ import annotations

from tools.models.recipes.recipe import (
    IDS,
    MEDIA,
    MROPE,
    PATCHES,
    PIXELS,
    QWEN_PICTURES,
    SIDE,
    TEXT,
    VISION,
    Recipe,
    part,
    processor,
    whole,
)

_STARTS = {"vision_start_token_id": "<start>", "vision_end_token_id": "<end>"}
_GLM_WORDS = ("<video>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
_GLM_IDS = {
    **IDS,
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_GLM_VIDEO = "<|begin_of_video|><video><|end_of_video|>"
_GLM_IMAGE = "<|begin_of_image|><image><|end_of_image|>"
_GLM_VISION = part("glm4v_vision", PATCHES, image_size=SIDE, out_hidden_size=64)
_GLM_TEXT = part("glm4v_text", TEXT, rope_parameters=lambda *_: dict(MROPE, partial_rotary_factor=1.0))

RECIPES: dict[str, Recipe] = {
    "glm4v": Recipe(
        whole(
            "glm4v",
            vision_config=_GLM_VISION,
            text_config=_GLM_TEXT,
            **_GLM_IDS,
        ),
        processor("Glm4vProcessor", "Glm4vImageProcessorPil", videos="Glm4vVideoProcessor", settings=QWEN_PICTURES),
        _GLM_WORDS,
        named=MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "glm4v_moe": Recipe(
        whole(
            "glm4v_moe",
            vision_config=part("glm4v_moe_vision", PATCHES, image_size=SIDE, out_hidden_size=64),
            text_config=part(
                "glm4v_moe_text",
                TEXT,
                moe_intermediate_size=32,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=1.5,
                rope_parameters=lambda *_: dict(MROPE, partial_rotary_factor=1.0),
            ),
            **_GLM_IDS,
        ),
        processor("Glm4vProcessor", "Glm4vImageProcessorPil", videos="Glm4vVideoProcessor", settings=QWEN_PICTURES),
        _GLM_WORDS,
        named=MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "glm46v": Recipe(
        whole("glm46v", vision_config=_GLM_VISION, text_config=_GLM_TEXT, **_GLM_IDS),
        processor("Glm46VProcessor", "Glm46VImageProcessorPil", videos="Glm46VVideoProcessor", settings=QWEN_PICTURES),
        _GLM_WORDS,
        named=MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "glm_ocr": Recipe(
        whole(
            "glm_ocr",
            vision_config=part("glm_ocr_vision", PATCHES, image_size=SIDE, out_hidden_size=64),
            text_config=part("glm_ocr_text", TEXT, rope_parameters=lambda *_: dict(MROPE, partial_rotary_factor=1.0)),
            **_GLM_IDS,
        ),
        processor("Glm46VProcessor", "Glm46VImageProcessorPil", videos="Glm46VVideoProcessor", settings=QWEN_PICTURES),
        _GLM_WORDS,
        named=MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "glmga": Recipe(
        whole("glmga", vision_config=_GLM_VISION, text_config=_GLM_TEXT, **_GLM_IDS),
        processor("Glm46VProcessor", "GlmgaImageProcessorPil", videos="Glm46VVideoProcessor", settings=QWEN_PICTURES),
        _GLM_WORDS,
        named=MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "cosmos3_edge": Recipe(
        whole(
            "cosmos3_edge",
            vision_config=part("cosmos3_edge_vision", VISION, num_patches=16),
            text_config=part("cosmos3_edge_text", TEXT, rope_parameters=lambda *_: dict(MROPE)),
            projector_hidden_size=48,
            **IDS,
            **_STARTS,
        ),
        processor(
            "Cosmos3EdgeProcessor",
            "Cosmos3EdgeImageProcessorPil",
            videos="Cosmos3EdgeVideoProcessor",
            settings={"patch_size": 14},
        ),
        ("<video>", "<start>", "<end>"),
        named={**MEDIA, "vision_start_token": "<start>", "vision_end_token": "<end>"},
    ),
    "cosmos3_omni": Recipe(
        whole(
            "cosmos3_omni",
            vision_config=part(
                "qwen3_vl_vision", PATCHES, out_hidden_size=64, num_position_embeddings=64, deepstack_visual_indexes=[0]
            ),
            text_config=part("qwen3_vl_text", TEXT, rope_parameters=lambda *_: dict(MROPE, mrope_interleaved=True)),
            **IDS,
            **_STARTS,
        ),
        processor(
            "Qwen3VLProcessor", "Qwen2VLImageProcessorPil", videos="Qwen3VLVideoProcessor", settings=QWEN_PICTURES
        ),
        ("<video>", "<start>", "<end>"),
        named={**MEDIA, "vision_start_token": "<start>", "vision_end_token": "<end>"},
        image="<start><image><end>",
        video="<start><video><end>",
    ),
    "ernie4_5_vl_moe": Recipe(
        whole(
            "ernie4_5_vl_moe",
            vision_config=part("ernie4_5_vl_moe_vision", PATCHES),
            text_config=part(
                "ernie4_5_vl_moe_text",
                TEXT,
                moe_intermediate_size=[32, 16],
                moe_k=2,
                moe_num_experts=4,
                moe_num_shared_experts=1,
                mlp_layer_types=["dense", "sparse", "sparse"],
                rope_parameters=lambda *_: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
            ),
            **IDS,
            image_start_token_id="<start>",
            image_end_token_id="<end>",
            video_start_token_id="<vstart>",
            video_end_token_id="<vend>",
            tie_word_embeddings=False,
        ),
        processor(
            "Ernie4_5_VLMoeProcessor",
            "Ernie4_5_VLMoeImageProcessorPil",
            videos="Ernie4_5_VLMoeVideoProcessor",
            settings={"size": PIXELS},
            frames={"draw_on_frames": False},
        ),
        ("<video>", "<start>", "<end>", "<vstart>", "<vend>"),
        named={
            **MEDIA,
            "image_start_token": "<start>",
            "image_end_token": "<end>",
            "video_start_token": "<vstart>",
            "video_end_token": "<vend>",
        },
        image="<start><image><end>",
        video="<start><video><end>",
    ),
    "hunyuan_vl": Recipe(
        whole(
            "hunyuan_vl",
            vision_config=part("hunyuan_vl_vision", {**VISION, "patch_size": 16}, max_image_size=256),
            text_config=part(
                "hunyuan_vl_text",
                TEXT,
                rope_parameters=lambda *_: {
                    "rope_type": "dynamic",
                    "rope_theta": 10000.0,
                    "factor": 1.0,
                    "alpha": 1000.0,
                    "mrope_section": [2, 2, 2, 2],
                },
                tie_word_embeddings=False,  # else the whole is tied, whatever it says
            ),
            image_token_id="<image>",
            im_start_id="<start>",
            im_end_id="<end>",
            tie_word_embeddings=False,
        ),
        processor(
            "HunYuanVLProcessor",
            "HunYuanVLImageProcessorPil",
            settings={"size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 24}},
        ),
        ("<start>", "<end>"),
        named={"image_token": "<image>", "image_start_token": "<start>", "image_end_token": "<end>"},
        image="<start><image><end>",
    ),
    "paddleocr_vl": Recipe(
        whole(
            "paddleocr_vl",
            vision_config=part("paddleocr_vl_vision", VISION),
            text_config=part("paddleocr_vl_text", TEXT, rope_parameters=lambda *_: dict(MROPE)),
            **IDS,
            **_STARTS,
            tie_word_embeddings=False,
        ),
        processor("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessorPil", settings={"size": PIXELS}),
        ("<video>", "<start>", "<end>"),
        named=MEDIA,
    ),
}
