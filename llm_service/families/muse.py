"""The texts of Muse Glimmer, and of Muse Spark."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import WINDOWED, Family, FeedForwardKind, LayerNorms, Mixer
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
MUSE_SPARK_TEXT = replace(
    MUSE_GLIMMER_TEXT,
    norms=LayerNorms(feed_forward_in="pre_feedforward_layernorm"),
    gated_residual=True,
    grouped_experts=True,
    sparse=FeedForwardKind.POOLED_EXPERTS,
    mixers=dict.fromkeys(WINDOWED, Mixer.NORMED_OUTPUT_ATTENTION),
    part_names={"experts.post_expert_norm": "post_expert_norm"},
)
