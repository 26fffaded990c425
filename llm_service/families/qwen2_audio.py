"""Qwen2-Audio: a Qwen2 decoder; the rows of a clip are counted like words in its prompts."""

from __future__ import annotations

from typing import Any, Final

from common.media.encoder_digest import QWEN2_AUDIO_PARTS
from common.media.item import Modality
from llm_service.families.family import AttentionRules, CheckpointNames, Family, InPrompt

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
"""transformers' defaults for Qwen2; the published config.json states only what differs."""

QWEN2_AUDIO = Family(
    {Modality.AUDIO: InPrompt("audio_token_index", counted=True)},
    encoder=QWEN2_AUDIO_PARTS,
    attention=AttentionRules(bias=True),
    checkpoint=CheckpointNames(text_defaults=_TEXT),
)
