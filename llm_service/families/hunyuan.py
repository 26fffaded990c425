"""Hunyuan's texts: HunyuanOCR's, with places on four axes, and heads that are normed once they are rotated; and Hunyuan
V4's, latent attention to the tokens that an index chooses, over several streams."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.deepseek import DEEPSEEK_V3_TEXT
from llm_service.families.family import FULL, INDEXED, Family, Mixer

HUNYUAN_TEXT = Family(
    {},
    qk_norm=True,
    mixers={FULL: Mixer.LATE_NORMED_ATTENTION},
    text_defaults={"rms_norm_eps": 1e-5},
    part_names={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
)
HUNYUAN4_TEXT = replace(
    DEEPSEEK_V3_TEXT,
    output_gate=True,
    gates_apart=True,
    latent_eps=None,
    index_eps=None,
    index_turns_last=True,
    sinks=True,
    cut_experts=True,
    mrope_interleaved=True,
    mixers={INDEXED: Mixer.INDEXED_LATENT_ATTENTION},
)
