"""Cohere 2's text, of Command A Vision and Aya Vision, and Cohere Compass's. The former's `logit_scale` is not read:
transformers' models with media leave its logits as they are."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import WINDOWED, CheckpointNames, Family, LayerNorms, LayerRules, NormRules, RopeRules

COHERE2_TEXT = Family(
    {},
    norms=NormRules(names=LayerNorms(feed_forward_in=""), layer_norm=True),
    rope=RopeRules(interleaved=True, local_only=True),
    layers=LayerRules(parallel_residual=True),
    checkpoint=CheckpointNames(
        text_defaults={
            "use_sliding_window": True,
            "sliding_window_pattern": 4,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }
    ),
    mixers=WINDOWED,
)
COHERE_COMPASS_TEXT = replace(
    COHERE2_TEXT,
    rope=replace(COHERE2_TEXT.rope, interleaved=False, mrope_interleaved=True),
    vocabulary=replace(COHERE2_TEXT.vocabulary, logit_scale="logit_scale"),
)
