"""The texts of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import (
    AttentionRules,
    CheckpointNames,
    Family,
    LayerNorms,
    MlpRules,
    MoeRules,
    NormRules,
    RopeRules,
)

GLM4V_TEXT = Family(
    {},
    attention=AttentionRules(bias=True),
    norms=NormRules(names=LayerNorms(mixer_out="post_self_attn_layernorm", feed_forward_out="post_mlp_layernorm")),
    rope=RopeRules(interleaved=True),
    mlp=MlpRules(fused_gate_up=True),
    checkpoint=CheckpointNames(text_defaults={"mrope_section": (8, 12, 12)}),
)
GLM_OCR_TEXT = replace(GLM4V_TEXT, attention=replace(GLM4V_TEXT.attention, bias=False))
GLM4V_MOE_TEXT = Family(
    {},
    attention=AttentionRules(bias=True),
    moe=MoeRules(grouped=True, ungated_shared=True),
    checkpoint=CheckpointNames(text_defaults={"mrope_section": (8, 12, 12)}),
)
