"""The texts of Muse Glimmer, and of Muse Spark."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import (
    WINDOWED,
    AttentionRules,
    CheckpointNames,
    Family,
    FeedForwardKind,
    LayerNorms,
    Mixer,
    NormRules,
    OutputGate,
    QkNorm,
    RopeRules,
    VocabularyRules,
)
from llm_service.families.gemma3 import GEMMA3_TEXT

MUSE_GLIMMER_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm(weights=False), output_gate=OutputGate.SEPARATE),
    norms=NormRules(names=GEMMA3_TEXT.norms.names, zero_centred=True, plain_final=True),
    rope=RopeRules(local_only=True),
    vocabulary=VocabularyRules(normed_embeddings=True, logit_scale="output_multiplier"),
    checkpoint=CheckpointNames(text_defaults={"use_sliding_window": True}),
    mixers=WINDOWED,
)
MUSE_SPARK_TEXT = replace(
    MUSE_GLIMMER_TEXT,
    norms=replace(MUSE_GLIMMER_TEXT.norms, names=LayerNorms(feed_forward_in="pre_feedforward_layernorm")),
    moe=replace(MUSE_GLIMMER_TEXT.moe, grouped=True, kind=FeedForwardKind.LATENT_EXPERTS),
    layers=replace(MUSE_GLIMMER_TEXT.layers, gated_residual=True),
    checkpoint=replace(MUSE_GLIMMER_TEXT.checkpoint, part_names={"experts.post_expert_norm": "post_expert_norm"}),
    mixers=dict.fromkeys(WINDOWED, Mixer.NORMED_OUTPUT_ATTENTION),
)
