"""Cohere 2's text, of Command A Vision and Aya Vision, and Cohere Compass's. The former's `logit_scale` is not read:
transformers' models with media leave its logits as they are."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import WINDOWED, Family, LayerNorms

COHERE2_TEXT = Family(
    {},
    norms=LayerNorms(feed_forward_in=""),
    layer_norms=True,
    parallel_residual=True,
    rotary_neighbours=True,
    rotary_in_windows=True,
    mixers=WINDOWED,
    text_defaults={
        "use_sliding_window": True,
        "sliding_window_pattern": 4,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
)
COHERE_COMPASS_TEXT = replace(COHERE2_TEXT, rotary_neighbours=False, logit_scale="logit_scale", mrope_interleaved=True)
