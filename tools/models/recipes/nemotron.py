"""Models over Nemotron-H's text: Mamba-2, attention and feed-forward parts, each a layer of its own."""

from __future__ import annotations

from typing import Any

from common.hf.classes import transformers
from tools.models.recipes.recipe import Recipe, Words, part, whole

_BANDS = 16
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "layers_block_type": [
        *("linear_attention", "moe", "linear_attention", "full_attention"),
        *("mlp", "linear_attention", "moe"),
    ],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 2.5,
}
_EARS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": _BANDS,
}
_SPEAKERS = 4


def _speakers(_: Words, __: int) -> Any:
    sizes = {"hidden_size": 16, "num_speakers": _SPEAKERS, "audio_hidden_size": _EARS["hidden_size"]}
    made = transformers().CONFIG_MAPPING["nemotron3_diarization"]
    cache = {"num_speakers": _SPEAKERS, "speaker_cache_length": 40}
    return made(audio_config=dict(_EARS), head_config=sizes, streaming_config=cache)


def _transcriber(tokenizer: Any, template: str) -> Any:
    extractor = transformers().NemotronAsrStreamingFeatureExtractor(feature_size=_BANDS)
    made = transformers().Nemotron3_5TranscribeProcessor(extractor, tokenizer, tokenizer, audio_token="<audio>")
    made.chat_template = template
    return made


_PATCH = 16
_RADIO: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mlp_ratio": 1.5,
    "patch_size": _PATCH,
    "max_img_size": 256,
    "video_temporal_patch_size": 2,
}
_CONV: dict[str, Any] = {"attention_bias": False, "scale_input": False, "subsampling_conv_channels": 8}


def _omni(tokenizer: Any, template: str) -> Any:
    lib, deviations = transformers(), {"norm_mean": [0.5] * 3, "norm_std": [0.25] * 3}
    made = lib.NemotronH_Omni_Reasoning_V3Processor(
        lib.NemotronH_Omni_Reasoning_V3ImageProcessor(min_num_patches=16, max_num_patches=64, **deviations),
        lib.NemotronH_Omni_Reasoning_V3VideoProcessor(video_target_num_patches=16, **deviations),
        tokenizer,
        lib.ParakeetFeatureExtractor(feature_size=_BANDS),
    )
    made.chat_template = template
    return made


RECIPES: dict[str, Recipe] = {
    "nemotron_h_omni": Recipe(
        whole(
            "nemotron_h_omni",
            vision_config=part("radio", _RADIO),
            text_config=part("nemotron_h", _TEXT, moe_latent_size=32),
            audio_config=part("parakeet_encoder", _EARS, **_CONV, projection_hidden_size=48, projection_bias=False),
            vision_hidden_size=_RADIO["hidden_size"],
            projector_hidden_size=48,
            image_token_id="<image>",
            video_token_id="<video>",
            audio_token_id="<so_embedding>",
        ),
        _omni,
        ("<video>", "<so_embedding>", "<so_start>", "<so_end>", "<img>", "</img>"),
        named={"image_token": "<image>", "video_token": "<video>"},
        audio="<so_embedding>",
    ),
    "nemo_speechlm": Recipe(
        whole(
            "nemo_speechlm",
            audio_config=part(
                "nemotron3_5_transcribe_audio",
                {},
                asr_config=part("nemotron3_5_transcribe_asr_audio", _EARS),
                diarization_config=_speakers,
            ),
            text_config=part("nemotron_h", _TEXT),
            word_timestamp_config=part("nemotron3_5_transcribe_word_timestamp", _EARS, blank_token_id=0),
            audio_token_id="<audio>",
            tie_word_embeddings=False,
        ),
        _transcriber,
        ("<audio>",),
    ),
}
