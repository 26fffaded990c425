"""Muse Glimmer's text."""

from __future__ import annotations

from llm_service.families.family import WINDOWED, Family
from llm_service.families.gemma3 import GEMMA3_TEXT

MUSE_GLIMMER_TEXT = Family(
    {},
    qk_norm=True,
    plain_head_norms=True,
    output_gate=True,
    gates_apart=True,
    norms=GEMMA3_TEXT.norms,
    zero_centred_norms=True,
    whole_last_gain=True,
    normed_embeddings=True,
    logit_scale="output_multiplier",
    rotary_in_windows=True,
    mixers=WINDOWED,
    text_defaults={"use_sliding_window": True},
)
