"""EXAONE 4's text."""

from __future__ import annotations

from llm_service.families.family import WINDOWED, Family, LayerNorms

EXAONE4_TEXT = Family(
    {},
    qk_norm=True,
    norms=LayerNorms(
        mixer_in="",
        feed_forward_in="",
        mixer_out="post_attention_layernorm",
        feed_forward_out="post_feedforward_layernorm",
    ),
    rotary_in_windows=True,
    mixers=WINDOWED,
    text_defaults={"use_sliding_window": True},
)
