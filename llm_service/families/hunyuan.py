"""Hunyuan's texts: HunyuanOCR's, with places on four axes, and heads that are normed once they are rotated; and Hunyuan
V4's, latent attention to the tokens that an index chooses, over several streams."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.deepseek import DEEPSEEK_V3_TEXT
from llm_service.families.family import (
    FULL,
    INDEXED,
    AttentionRules,
    CheckpointNames,
    Family,
    Mixer,
    OutputGate,
    QkNorm,
)

HUNYUAN_TEXT = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm()),
    checkpoint=CheckpointNames(
        text_defaults={"rms_norm_eps": 1e-5}, part_names={"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    ),
    mixers={FULL: Mixer.LATE_NORMED_ATTENTION},
)
HUNYUAN4_TEXT = replace(
    DEEPSEEK_V3_TEXT,
    attention=replace(DEEPSEEK_V3_TEXT.attention, output_gate=OutputGate.SEPARATE, sinks=True),
    latent=replace(DEEPSEEK_V3_TEXT.latent, norm_eps=None),
    indexer=replace(DEEPSEEK_V3_TEXT.indexer, norm_eps=None, rope_last=True),
    rope=replace(DEEPSEEK_V3_TEXT.rope, mrope_interleaved=True),
    moe=replace(DEEPSEEK_V3_TEXT.moe, limited_experts=True),
    mixers={INDEXED: Mixer.INDEXED_LATENT_ATTENTION},
)
