"""Models that hear, of which some see as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.hf.classes import transformers
from tools.models.recipes.recipe import (
    GRANITE,
    IDS,
    LLAMA,
    MEDIA,
    MROPE,
    PATCHES,
    QWEN2,
    QWEN3,
    QWEN_PICTURES,
    TEXT,
    VISION,
    Recipe,
    part,
    processor,
    whole,
)

_BANDS = 16
_EARS: dict[str, Any] = {
    "num_mel_bins": _BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
}
_WHISPER = {"feature_size": _BANDS, "chunk_length": 10}
_WHISPER_EARS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": _BANDS,
    "max_source_positions": 500,
}
_OMNI_WORDS = ("<video>", "<audio>", "<start>", "<end>", "<listen>", "<heard>")
_OMNI_NAMES = {
    **MEDIA,
    "audio_token": "<audio>",
    "vision_bos_token": "<start>",
    "vision_eos_token": "<end>",
    "audio_bos_token": "<listen>",
    "audio_eos_token": "<heard>",
}
_OMNI_IDS = {
    **IDS,
    "audio_token_id": "<audio>",
    "vision_start_token_id": "<start>",
    "vision_end_token_id": "<end>",
    "audio_start_token_id": "<listen>",
    "audio_end_token_id": "<heard>",
}
_TEXT_LINEARS = r".*\.language_model\..*\.(q_proj|v_proj|down_proj)"
_CONFORMER: dict[str, Any] = {
    "input_dim": 160,
    "num_layers": 2,
    "hidden_dim": 32,
    "feedforward_mult": 2,
    "num_heads": 2,
    "dim_head": 16,
    "context_size": 20,
    "max_pos_emb": 32,
}
_QFORMER: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ONE]", "[TWO]", "[THREE]", "[FOUR]"),
    *("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[ARGS]", "[CALL_ID]"),
)
"""Of which Mistral's package wants some, two of them at these places."""


def _granite_speech(tokenizer: Any, template: str) -> Any:
    extractor = transformers().GraniteSpeechFeatureExtractor()
    made = transformers().GraniteSpeechProcessor(extractor, tokenizer)
    made.chat_template = template
    return made


def _phi4(tokenizer: Any, template: str) -> Any:
    parts = transformers().Phi4MultimodalImageProcessor(), transformers().Phi4MultimodalFeatureExtractor()
    made = transformers().Phi4MultimodalProcessor(*parts, tokenizer)
    made.chat_template = template
    return made


_VIBEVOICE_EARS: dict[str, Any] = {
    "hidden_size": 16,
    "num_filters": 4,
    "downsampling_ratios": [5, 8, 8, 10],
    "depths": [1, 1, 1, 1, 2],
}
_PHI4_LINEARS = r".*layers\.\d+\.(self_attn\.(qkv_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
_PHI4_FACTORS: dict[str, Any] = {
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 24.0],
}


def _glmasr(**more: Any) -> Recipe:
    return Recipe(
        whole(
            "glmasr",
            audio_config=part(
                "glmasr_encoder",
                {},
                hidden_size=32,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_mel_bins=_BANDS,
                max_position_embeddings=500,
            ),
            text_config=LLAMA,
            audio_token_id="<audio>",
            tie_word_embeddings=False,
            **more,
        ),
        processor("GlmAsrProcessor", sounds="WhisperFeatureExtractor", bands=_WHISPER, audio_token="<audio>"),
        ("<audio>",),
    )


RECIPES: dict[str, Recipe] = {
    "qwen2_5_omni_thinker": Recipe(
        whole(
            "qwen2_5_omni_thinker",
            vision_config=part(
                "qwen2_5_omni_vision_encoder", PATCHES, out_hidden_size=64, window_size=56, fullatt_block_indexes=[1]
            ),
            audio_config=part("qwen2_5_omni_audio_encoder", _EARS, max_source_positions=100, n_window=20),
            text_config=part("qwen2_5_omni_text", TEXT, rope_parameters=lambda *_: dict(MROPE)),
            **_OMNI_IDS,
        ),
        processor(
            "Qwen2_5OmniProcessor",
            "Qwen2VLImageProcessorPil",
            videos="Qwen2VLVideoProcessor",
            settings=QWEN_PICTURES,
            sounds="WhisperFeatureExtractor",
            bands=_WHISPER,
        ),
        _OMNI_WORDS,
        named=_OMNI_NAMES,
        image="<start><image><end>",
        video="<start><video><end>",
        audio="<listen><audio><heard>",
    ),
    "qwen3_omni_moe_thinker": Recipe(
        whole(
            "qwen3_omni_moe_thinker",
            vision_config=part(
                "qwen3_omni_moe_vision_encoder",
                PATCHES,
                out_hidden_size=64,
                num_position_embeddings=64,
                deepstack_visual_indexes=[0],
            ),
            audio_config=part(
                "qwen3_omni_moe_audio_encoder",
                _EARS,
                max_source_positions=100,
                n_window_infer=200,
                downsample_hidden_size=8,
            ),
            text_config=part(
                "qwen3_omni_moe_text",
                TEXT,
                rope_parameters=lambda *_: dict(MROPE, mrope_interleaved=True),
                moe_intermediate_size=32,
                num_experts=4,
                num_experts_per_tok=2,
            ),
            **_OMNI_IDS,
        ),
        processor(
            "Qwen3OmniMoeProcessor",
            "Qwen2VLImageProcessorPil",
            videos="Qwen2VLVideoProcessor",
            settings=QWEN_PICTURES,
            sounds="WhisperFeatureExtractor",
            bands=_WHISPER,
        ),
        _OMNI_WORDS,
        named=_OMNI_NAMES,
        image="<start><image><end>",
        video="<start><video><end>",
        audio="<listen><audio><heard>",
    ),
    "qwen3_asr": Recipe(
        whole(
            "qwen3_asr",
            audio_config=part("qwen3_asr_encoder", _EARS, n_window_infer=200, downsample_hidden_size=8),
            text_config=QWEN3,
            audio_token_id="<audio>",
            tie_word_embeddings=False,
        ),
        processor("Qwen3ASRProcessor", sounds="Qwen3ASRFeatureExtractor", bands={"feature_size": _BANDS}),
        ("<audio>", "<listen>", "<heard>", "<asr_text>"),
        named={"audio_token": "<audio>", "audio_bos_token": "<listen>", "audio_eos_token": "<heard>"},
        audio="<listen><audio><heard>",
    ),
    "audioflamingo3": Recipe(
        whole(
            "audioflamingo3",
            audio_config=part("audioflamingo3_encoder", {}, **_WHISPER_EARS),
            text_config=QWEN2,
            audio_token_id="<audio>",
            tie_word_embeddings=False,
        ),
        processor("AudioFlamingo3Processor", sounds="WhisperFeatureExtractor", bands=_WHISPER, audio_token="<audio>"),
        ("<audio>",),
    ),
    "omniasr": Recipe(
        whole(
            "omniasr",
            audio_config=part(
                "omniasr_audio",
                {},
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                conv_dim=[16] * 7,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
            ),
            text_config=LLAMA,
            audio_token_id="<audio>",
        ),
        processor("OmniASRProcessor", sounds="OmniASRFeatureExtractor", audio_token="<audio>"),
        ("<audio>",),
    ),
    "musicflamingo": Recipe(
        whole(
            "musicflamingo",
            audio_config=part("audioflamingo3_encoder", {}, **_WHISPER_EARS),
            text_config=QWEN2,
            audio_token_id="<audio>",
            audio_bos_token_id="<listen>",
            audio_eos_token_id="<heard>",
            tie_word_embeddings=False,
        ),
        processor(
            "MusicFlamingoProcessor",
            sounds="WhisperFeatureExtractor",
            bands=_WHISPER,
            audio_token="<audio>",
            audio_bos_token="<listen>",
            audio_eos_token="<heard>",
        ),
        ("<audio>", "<listen>", "<heard>"),
    ),
    "moss_transcribe_diarize": Recipe(
        whole(
            "moss_transcribe_diarize",
            audio_config=part("moss_transcribe_diarize_audio", {}, **_WHISPER_EARS),
            text_config=QWEN3,
            audio_token_id="<audio>",
            audio_chunk_size=160_000,
            tie_word_embeddings=False,
        ),
        processor(
            "MossTranscribeDiarizeProcessor",
            sounds="MossTranscribeDiarizeFeatureExtractor",
            bands=_WHISPER,
            audio_token="<audio>",
            audio_bos_token="<listen>",
            audio_eos_token="<heard>",
        ),
        ("<audio>", "<listen>", "<heard>"),
        audio="<listen><audio><heard>",
    ),
    "voxtral": Recipe(
        whole(
            "voxtral",
            audio_config=part("voxtral_encoder", {}, **{**_WHISPER_EARS, "max_source_positions": 1500}),
            text_config=part("llama", TEXT, eos_token_id="</s>"),
            audio_token_id="[AUDIO]",
            tie_word_embeddings=False,
        ),
        lambda *_: transformers().WhisperFeatureExtractor(feature_size=_BANDS),
        tekken=_TEKKEN,
    ),
    "vibevoice_asr": Recipe(
        whole(
            "vibevoice_asr",
            acoustic_tokenizer_encoder_config=part("vibevoice_acoustic_tokenizer_encoder", {}, **_VIBEVOICE_EARS),
            semantic_tokenizer_encoder_config=part(
                "vibevoice_acoustic_tokenizer_encoder", {}, **{**_VIBEVOICE_EARS, "hidden_size": 24}
            ),
            text_config=QWEN2,
            audio_token_id="<audio>",
            acoustic_tokenizer_chunk_size=16_000,
            tie_word_embeddings=False,
        ),
        processor(
            "VibeVoiceAsrProcessor",
            sounds="VibeVoiceAcousticTokenizerFeatureExtractor",
            audio_token="<audio>",
            audio_bos_token="<listen>",
            audio_eos_token="<heard>",
        ),
        ("<audio>", "<listen>", "<heard>"),
        audio="<listen><audio><heard>of <|AUDIO_DURATION|> seconds: ",
    ),
    "phi4_multimodal": Recipe(
        part(
            "phi4_multimodal",
            {**TEXT, "max_position_embeddings": 8192},
            original_max_position_embeddings=4096,
            rope_parameters=lambda *_: {"rope_type": "longrope", "rope_theta": 10000.0, **_PHI4_FACTORS},
            eos_token_id="</s>",
            vision_config=part(
                "phi4_multimodal_vision",
                {**VISION, "image_size": 448},
                num_channels=3,
                image_token_id="<image>",
            ),
            audio_config=part(
                "phi4_multimodal_audio",
                {},
                hidden_size=32,
                intermediate_size=48,
                num_blocks=2,
                num_attention_heads=2,
                ext_pw_out_channel=32,
                depthwise_separable_out_channel=32,
                nemo_conv_channels=8,
                audio_token_id="<audio>",
            ),
            tie_word_embeddings=True,
        ),
        _phi4,
        ("<audio>",),
        named={"image_token": "<image>", "audio_token": "<audio>"},
        adapters={
            "vision-lora": {"r": 4, "lora_alpha": 8, "target_modules": _PHI4_LINEARS},
            "speech-lora": {"r": 5, "lora_alpha": 10, "target_modules": _PHI4_LINEARS},
        },
    ),
    "glmasr": _glmasr(),
    "fun_asr_nano": Recipe(
        whole(
            "fun_asr_nano",
            audio_config=part(
                "fun_asr_nano_encoder",
                {},
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_mel_bins=_BANDS,
                num_timestamp_prediction_layers=1,
            ),
            adaptor_config={"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 16},
            text_config=QWEN3,
            audio_token_id="<audio>",
            tie_word_embeddings=False,
        ),
        processor(
            "FunAsrNanoProcessor",
            sounds="FunAsrNanoFeatureExtractor",
            bands={"feature_size": _BANDS},
            audio_token="<audio>",
        ),
        ("<audio>",),
    ),
    **{
        kind: Recipe(
            whole(
                kind,
                encoder_config=part(f"{kind}_encoder", {}, **_CONFORMER, **more),
                projector_config=part("blip_2_qformer", _QFORMER, encoder_hidden_size=width, num_hidden_layers=2),
                text_config=GRANITE,
                audio_token_index="<audio>",
                tie_word_embeddings=False,
            ),
            _granite_speech,
            ("<audio>",),
            named={"audio_token": "<audio>"},
            adapters={".": {"r": 4, "lora_alpha": 8, "target_modules": _TEXT_LINEARS}},
        )
        for kind, more, width in (("granite_speech", {}, 32), ("granite_speech_plus", {"cat_hidden_layers": [1]}, 64))
    },
}
HEARING_BY_ADAPTER = replace(
    _glmasr(has_lora_adapter=True), adapters={".": {"r": 4, "lora_alpha": 8, "target_modules": _TEXT_LINEARS}}
)
"""A kind whose text both decoders compute, with an adapter for sounds, as no published one is."""
