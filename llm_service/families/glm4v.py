"""The texts of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import Family, LayerNorms

GLM4V_TEXT = Family(
    {},
    attention_bias=True,
    norms=LayerNorms(mixer_out="post_self_attn_layernorm", feed_forward_out="post_mlp_layernorm"),
    rotary_neighbours=True,
    fused_gates=True,
    text_defaults={"mrope_section": (8, 12, 12)},
)
GLM_OCR_TEXT = replace(GLM4V_TEXT, attention_bias=False)
GLM4V_MOE_TEXT = Family(
    {},
    attention_bias=True,
    grouped_experts=True,
    ungated_shared=True,
    text_defaults={"mrope_section": (8, 12, 12)},
)
