"""Qwen3.5, dense or a mixture of experts: three layers of four keep a state in place of keys and values."""

from __future__ import annotations

from llm_service.families.family import Family, Mixer
from llm_service.families.qwen3_vl import MODALITIES

QWEN3_5 = Family(
    MODALITIES,
    qk_norm=True,
    output_gate=True,
    zero_centred_norms=True,
    mrope_interleaved=True,
    rotary_share=0.25,
    mixers={"full_attention": Mixer.ATTENTION, "linear_attention": Mixer.GATED_DELTA_NET},
)
