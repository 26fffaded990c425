"""Apertus 1.5's text: xIELU without gates, and norms of each head's queries and keys."""

from __future__ import annotations

from llm_service.families.family import Family, LayerNorms

APERTUS_TEXT = Family(
    {},
    qk_norm=True,
    ungated=True,
    norms=LayerNorms("attention_layernorm", "feedforward_layernorm"),
    text_defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5},
)
