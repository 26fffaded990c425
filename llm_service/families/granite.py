"""The texts of Granite and HyperCLOVA X, whose configurations state multipliers of embeddings, attention, residuals and
logits."""

from __future__ import annotations

from llm_service.families.family import Family, LayerNorms, NormRules, VocabularyRules

GRANITE_TEXT = Family({}, vocabulary=VocabularyRules(logit_divisor="logits_scaling"))
HYPERCLOVAX_TEXT = Family(
    {},
    norms=NormRules(names=LayerNorms(mixer_out="post_norm1", feed_forward_out="post_norm2")),
    vocabulary=VocabularyRules(logit_scale="logits_scaling"),
)
