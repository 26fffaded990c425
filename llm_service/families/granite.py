"""The texts of Granite and HyperCLOVA X, whose configurations state what embeddings, attention, residuals and logits
are multiplied by."""

from __future__ import annotations

from llm_service.families.family import Family, LayerNorms

GRANITE_TEXT = Family({}, logit_divisor="logits_scaling")
HYPERCLOVAX_TEXT = Family(
    {}, norms=LayerNorms(mixer_out="post_norm1", feed_forward_out="post_norm2"), logit_scale="logits_scaling"
)
