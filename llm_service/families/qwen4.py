"""Qwen4: Qwen3.5's mixture of experts with hyper-connections, attention to tokens that an index chooses, and n-gram
embeddings in some layers."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import FULL, INDEXED, LayerNorms, Mixer
from llm_service.families.qwen3_5 import QWEN3_5

QWEN4 = replace(
    QWEN3_5,
    norms=replace(QWEN3_5.norms, names=LayerNorms("", "")),
    checkpoint=replace(QWEN3_5.checkpoint, text_defaults={"full_attention_interval": 4}),
    mixers={
        FULL: Mixer.INDEXED_ATTENTION,
        INDEXED: Mixer.INDEXED_ATTENTION,
        "linear_attention": Mixer.GATED_DELTA_NET,
    },
)
