"""How tiny checkpoints of the library's models are made: by `model_type`, the parts of a configuration and of a
processor. Names of special tokens stand for their ids in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.library_models import library

SIDE = 56
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 14,
}
PATCHES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 14}
"""Of towers that take packed patches."""

PINPOINTS = [[SIDE, 112], [112, SIDE], [112, 112]]
SQUARE = {"height": SIDE, "width": SIDE}
PIXELS = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24}
"""Least and most of a picture, of processors that count them so."""

Words = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint of one architecture is made: its configuration, of the ids of special tokens and the size of the
    vocabulary; its processor, of the tokenizer and the template; and its other special tokens, of which the tokenizer
    has a name for those in `named`. `image` and `video` stand for
    one in a chat. `pieces`: its tokenizer is one of pieces,
    which sets a mark before the first word of a text; else one of bytes. Steps of `step_tokens` hold what
    no chunk may end within."""

    config: Callable[[Words, int], Any]
    processor: Callable[[Any, str], Any]
    words: tuple[str, ...] = ()
    pieces: bool = False
    named: Mapping[str, str] = field(default_factory=dict)
    image: str = "<image>"
    video: str = "<video>"
    step_tokens: int = 16


def part(kind: str, sizes: Mapping[str, Any], **more: Any) -> Callable[[Words, int], Any]:
    """A configuration by its `model_type`, of those sizes that it has; `more` are its own."""

    def make(words: Words, vocabulary: int) -> Any:
        cls = library().CONFIG_MAPPING[kind]
        known = cls.__dataclass_fields__.keys()
        common = {**sizes, "vocab_size": vocabulary, "pad_token_id": words["<pad>"], "bos_token_id": words["<s>"]}
        given = {name: value for name, value in common.items() if name in known}
        return cls(**{**given, **_filled(more, words, vocabulary)})

    return make


def whole(kind: str, **more: Any) -> Callable[[Words, int], Any]:
    """The same of a model, whose parts are among what is its own."""
    return part(kind, {}, **more)


def _filled(given: Mapping[str, Any], words: Words, vocabulary: int) -> dict[str, Any]:
    return {name: _value(value, words, vocabulary) for name, value in given.items()}


def _value(value: Any, words: Words, vocabulary: int) -> Any:
    if callable(value):
        return value(words, vocabulary)
    if isinstance(value, str):
        return words.get(value, value)
    return [_value(each, words, vocabulary) for each in value] if isinstance(value, list) else value


def processor(
    kind: str,
    pictures: str,
    *,
    settings: Mapping[str, Any] | None = None,
    videos: str = "",
    stills: Mapping[str, Any] | None = None,
    frames: Mapping[str, Any] | None = None,
    sounds: str = "",
    **more: Any,
) -> Callable[[Any, str], Any]:
    """A processor by its class, with that of pictures, that of videos where it needs one, both of these settings and
    of their own, `stills` and `frames`, and what extracts features of sounds."""

    def make(tokenizer: Any, template: str) -> Any:
        lib, given = library(), dict(settings or {})
        parts = {"image_processor": getattr(lib, pictures)(**given, **(stills or {})), "tokenizer": tokenizer}
        if videos:
            parts["video_processor"] = getattr(lib, videos)(**given, **(frames or {}))
        if sounds:
            parts["feature_extractor"] = getattr(lib, sounds)()
        return getattr(lib, kind)(**parts, chat_template=template, **more)

    return make


_LLAMA = part("llama", TEXT)
_QWEN2 = part("qwen2", TEXT)
_QWEN3 = part("qwen3", TEXT)
_CLIP = part("clip_vision_model", VISION, projection_dim=32)
_SIGLIP = part("siglip_vision_model", VISION, vision_use_head=False)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_CROPPED: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
_WINDOWED = ["sliding_attention", "sliding_attention", "full_attention"]
_BICUBIC = 3
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_MEDIA = {"image_token": "<image>", "video_token": "<video>"}
_QWEN_PICTURES = {"size": PIXELS, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_IDS = {"image_token_id": "<image>", "video_token_id": "<video>"}
_STARTS = {"vision_start_token_id": "<start>", "vision_end_token_id": "<end>"}
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

_GEMMA4_WORDS = ("<soft>", "<start>", "<end>", "<|video|>", "<sound>", "<sound-start>", "<sound-end>")
_GEMMA4_NAMES = {
    "boi_token": "<start>",
    "eoi_token": "<end>",
    "image_token": "<soft>",
    "audio_token": "<sound>",
    "boa_token": "<sound-start>",
    "eoa_token": "<sound-end>",
}
_GLM_WORDS = ("<video>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
_GLM_IDS = {
    **_IDS,
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_GLM_VIDEO = "<|begin_of_video|><video><|end_of_video|>"
_GLM_IMAGE = "<|begin_of_image|><image><|end_of_image|>"
_GLM_VISION = part("glm4v_vision", PATCHES, image_size=SIDE, out_hidden_size=64)
_GLM_TEXT = part("glm4v_text", TEXT, rope_parameters=lambda *_: dict(_MROPE, partial_rotary_factor=1.0))
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
    "llava": Recipe(
        whole("llava", vision_config=_CLIP, text_config=_LLAMA, image_token_index="<image>"),
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
            vision_config=_CLIP,
            text_config=_LLAMA,
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
    "llava_onevision": Recipe(
        whole(
            "llava_onevision",
            vision_config=_SIGLIP,
            text_config=_QWEN2,
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
    "idefics3": Recipe(
        whole(
            "idefics3",
            vision_config=part("idefics3_vision", VISION),
            text_config=_LLAMA,
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
    "internvl": Recipe(
        whole(
            "internvl",
            vision_config=part(
                "internvl_vision",
                {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]},
                use_absolute_position_embeddings=True,
            ),
            text_config=_QWEN2,
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
    "aya_vision": Recipe(
        whole(
            "aya_vision",
            vision_config=_SIGLIP,
            text_config=part("cohere2", TEXT, sliding_window=24, layer_types=_WINDOWED),
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
    "gemma3": Recipe(
        whole(
            "gemma3",
            vision_config=_SIGLIP,
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
    "cohere2_vision": Recipe(
        whole(
            "cohere2_vision",
            vision_config=_SIGLIP,
            text_config=part(
                "cohere2",
                TEXT,
                sliding_window=24,
                layer_types=_WINDOWED,
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
    "cosmos3_edge": Recipe(
        whole(
            "cosmos3_edge",
            vision_config=part("cosmos3_edge_vision", VISION, num_patches=16),
            text_config=part("cosmos3_edge_text", TEXT, rope_parameters=lambda *_: dict(_MROPE)),
            projector_hidden_size=48,
            **_IDS,
            **_STARTS,
        ),
        processor(
            "Cosmos3EdgeProcessor",
            "Cosmos3EdgeImageProcessorPil",
            videos="Cosmos3EdgeVideoProcessor",
            settings={"patch_size": 14},
        ),
        ("<video>", "<start>", "<end>"),
        named={**_MEDIA, "vision_start_token": "<start>", "vision_end_token": "<end>"},
    ),
    "deepseek_vl": Recipe(
        whole(
            "deepseek_vl",
            vision_config=_SIGLIP,
            text_config=_LLAMA,
            image_token_id="<image>",
            tie_word_embeddings=False,
        ),
        processor("DeepseekVLProcessor", "DeepseekVLImageProcessorPil", settings={"size": SQUARE}, num_image_tokens=16),
        named={"image_token": "<image>"},
    ),
    "deepseek_vl_hybrid": Recipe(
        whole(
            "deepseek_vl_hybrid",
            vision_config=_SIGLIP,
            high_res_vision_config=part("sam_vision_model", _SAM),
            text_config=_LLAMA,
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
                layer_types=_WINDOWED,
            ),
            **_IDS,
        ),
        processor(
            "Exaone4_5_Processor", "Qwen2VLImageProcessorPil", videos="Qwen2VLVideoProcessor", settings=_QWEN_PICTURES
        ),
        ("<video>",),
        named=_MEDIA,
    ),
    "glm4v": Recipe(
        whole(
            "glm4v",
            vision_config=_GLM_VISION,
            text_config=_GLM_TEXT,
            **_GLM_IDS,
        ),
        processor("Glm4vProcessor", "Glm4vImageProcessorPil", videos="Glm4vVideoProcessor", settings=_QWEN_PICTURES),
        _GLM_WORDS,
        named=_MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "got_ocr2": Recipe(
        whole(
            "got_ocr2",
            vision_config=part("got_ocr2_vision", {**_SAM, "image_size": 1024}),
            text_config=_QWEN2,
            image_token_index="<imgpad>",
            image_seq_length=256,
            tie_word_embeddings=False,
        ),
        processor("GotOcr2Processor", "GotOcr2ImageProcessorPil", settings={"size": {"height": 1024, "width": 1024}}),
        ("<imgpad>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"),
        image="<imgpad>",
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
                embedding_multiplier=1.0,
                logits_scaling=1.0,
                residual_multiplier=1.0,
                attention_multiplier=0.25,
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
    "hyperclovax_vision_v2": Recipe(
        whole(
            "hyperclovax_vision_v2",
            vision_config=part(
                "qwen2_5_vl_vision", PATCHES, out_hidden_size=64, window_size=56, fullatt_block_indexes=[1]
            ),
            text_config=part("hyperclovax", TEXT),
            **_IDS,
            tie_word_embeddings=False,
        ),
        processor(
            "HyperCLOVAXVisionV2Processor",
            "Qwen2VLImageProcessorPil",
            videos="Qwen2VLVideoProcessor",
            settings=_QWEN_PICTURES,
        ),
        ("<video>",),
        named=_MEDIA,
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
            text_config=_LLAMA,
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
            **_IDS,
            tie_word_embeddings=False,
        ),
        processor(
            "Kimi_K25Processor",
            "Kimi_K25ImageProcessor",
            videos="Kimi_K25VideoProcessor",
            settings={"size": {"max_height": 8, "max_width": 8}, "max_patches": 40},
        ),
        ("<video>",),
        named=_MEDIA,
    ),
    "lighton_ocr": Recipe(
        whole(
            "lighton_ocr",
            vision_config=part("pixtral", {**VISION, "image_size": 112}),
            text_config=_QWEN3,
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
    "llava_next_video": Recipe(
        whole(
            "llava_next_video",
            vision_config=_CLIP,
            text_config=_LLAMA,
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
    "ovis2": Recipe(
        whole(
            "ovis2",
            vision_config=part("ovis2_vision", VISION, vocab_size=40, hidden_stride=2, num_visual_indicator_tokens=5),
            text_config=_QWEN2,
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
    "paddleocr_vl": Recipe(
        whole(
            "paddleocr_vl",
            vision_config=part("paddleocr_vl_vision", VISION),
            text_config=part("paddleocr_vl_text", TEXT, rope_parameters=lambda *_: dict(_MROPE)),
            **_IDS,
            **_STARTS,
            tie_word_embeddings=False,
        ),
        processor("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessorPil", settings={"size": PIXELS}),
        ("<video>", "<start>", "<end>"),
        named=_MEDIA,
    ),
    "qianfan_ocr": Recipe(
        whole(
            "qianfan_ocr",
            vision_config=part("qianfan_ocr_vision", {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]}),
            text_config=_QWEN3,
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
    "smolvlm": Recipe(
        whole(
            "smolvlm",
            vision_config=part("smolvlm_vision", VISION),
            text_config=_LLAMA,
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
    "video_llama_3": Recipe(
        whole(
            "video_llama_3",
            vision_config=part("video_llama_3_vision", VISION),
            text_config=_QWEN2,
            **_IDS,
        ),
        processor(
            "VideoLlama3Processor",
            "VideoLlama3ImageProcessorPil",
            videos="VideoLlama3VideoProcessor",
            settings={"size": PIXELS, "patch_size": 14, "merge_size": 1, "temporal_patch_size": 1},
        ),
        ("<video>",),
        named=_MEDIA,
    ),
    "video_llava": Recipe(
        whole(
            "video_llava",
            vision_config=_CLIP,
            text_config=_LLAMA,
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
    "vipllava": Recipe(
        whole(
            "vipllava",
            vision_config=_CLIP,
            text_config=_LLAMA,
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
                layer_types=_WINDOWED,
                rope_parameters=lambda *_: {"sliding_attention": dict(_MROPE), "full_attention": None},
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
            settings=_QWEN_PICTURES,
        ),
        ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>"),
        image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        video="<|VISION_START|><|VIDEO_PAD|><|VISION_END|>",
    ),
    "cosmos3_omni": Recipe(
        whole(
            "cosmos3_omni",
            vision_config=part(
                "qwen3_vl_vision", PATCHES, out_hidden_size=64, num_position_embeddings=64, deepstack_visual_indexes=[0]
            ),
            text_config=part("qwen3_vl_text", TEXT, rope_parameters=lambda *_: dict(_MROPE, mrope_interleaved=True)),
            **_IDS,
            **_STARTS,
        ),
        processor(
            "Qwen3VLProcessor", "Qwen2VLImageProcessorPil", videos="Qwen3VLVideoProcessor", settings=_QWEN_PICTURES
        ),
        ("<video>", "<start>", "<end>"),
        named={**_MEDIA, "vision_start_token": "<start>", "vision_end_token": "<end>"},
        image="<start><image><end>",
        video="<start><video><end>",
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
            **_IDS,
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
            **_MEDIA,
            "image_start_token": "<start>",
            "image_end_token": "<end>",
            "video_start_token": "<vstart>",
            "video_end_token": "<vend>",
        },
        image="<start><image><end>",
        video="<start><video><end>",
    ),
    "gemma4": Recipe(
        whole(
            "gemma4",
            vision_config=part(
                "gemma4_vision",
                {**VISION, "patch_size": 8},
                head_dim=16,
                num_key_value_heads=2,
                position_embedding_size=64,
                pooling_kernel_size=2,
            ),
            text_config=part(
                "gemma4_text",
                {**TEXT, "num_hidden_layers": 6},
                global_head_dim=32,
                sliding_window=24,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=lambda _, vocabulary: vocabulary,
                num_kv_shared_layers=2,
                use_bidirectional_attention="vision",
                layer_types=_WINDOWED * 2,
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
            "Gemma4Processor",
            "Gemma4ImageProcessorPil",
            videos="Gemma4VideoProcessor",
            frames={"num_frames": 8},
            settings={"max_soft_tokens": 70, "pooling_kernel_size": 2, "patch_size": 8},
            sounds="Gemma4AudioFeatureExtractor",
        ),
        _GEMMA4_WORDS,
        named=_GEMMA4_NAMES,
        image="<soft>",
        video="<|video|>",
        step_tokens=80,
    ),
    "glm46v": Recipe(
        whole("glm46v", vision_config=_GLM_VISION, text_config=_GLM_TEXT, **_GLM_IDS),
        processor("Glm46VProcessor", "Glm46VImageProcessorPil", videos="Glm46VVideoProcessor", settings=_QWEN_PICTURES),
        _GLM_WORDS,
        named=_MEDIA,
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
                n_routed_experts=4,
                num_experts_per_tok=2,
                rope_parameters=lambda *_: dict(_MROPE, partial_rotary_factor=1.0),
            ),
            **_GLM_IDS,
        ),
        processor("Glm4vProcessor", "Glm4vImageProcessorPil", videos="Glm4vVideoProcessor", settings=_QWEN_PICTURES),
        _GLM_WORDS,
        named=_MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "glm_ocr": Recipe(
        whole(
            "glm_ocr",
            vision_config=part("glm_ocr_vision", PATCHES, image_size=SIDE, out_hidden_size=64),
            text_config=part("glm_ocr_text", TEXT, rope_parameters=lambda *_: dict(_MROPE, partial_rotary_factor=1.0)),
            **_GLM_IDS,
        ),
        processor("Glm46VProcessor", "Glm46VImageProcessorPil", videos="Glm46VVideoProcessor", settings=_QWEN_PICTURES),
        _GLM_WORDS,
        named=_MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
    ),
    "glmga": Recipe(
        whole("glmga", vision_config=_GLM_VISION, text_config=_GLM_TEXT, **_GLM_IDS),
        processor("Glm46VProcessor", "GlmgaImageProcessorPil", videos="Glm46VVideoProcessor", settings=_QWEN_PICTURES),
        _GLM_WORDS,
        named=_MEDIA,
        image=_GLM_IMAGE,
        video=_GLM_VIDEO,
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
                patch_sizes=[4, 2],
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
                layer_types=_WINDOWED,
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
                layer_types=_WINDOWED * 2,
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
    ),
}
