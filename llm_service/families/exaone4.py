"""EXAONE 4's text."""

from __future__ import annotations

from llm_service.families.family import (
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    LayerNorms,
    NormRules,
    QkNorm,
    RopeRules,
)

EXAONE4_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm()),
    norms=NormRules(
        names=LayerNorms(
            mixer_in="",
            feed_forward_in="",
            mixer_out="post_attention_layernorm",
            feed_forward_out="post_feedforward_layernorm",
        )
    ),
    rope=RopeRules(local_only=True),
    checkpoint=CheckpointNames(text_defaults={"use_sliding_window": True}),
    mixers=WINDOWED,
)
