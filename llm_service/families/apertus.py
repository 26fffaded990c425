"""Apertus 1.5's text: xIELU without gates, and norms of each head's queries and keys."""

from __future__ import annotations

from llm_service.families.family import AttentionRules, CheckpointNames, Family, LayerNorms, MlpRules, NormRules, QkNorm

APERTUS_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm()),
    norms=NormRules(names=LayerNorms("attention_layernorm", "feedforward_layernorm")),
    mlp=MlpRules(ungated=True),
    checkpoint=CheckpointNames(text_defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5}),
)
