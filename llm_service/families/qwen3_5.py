"""Qwen3.5, dense or with experts: three of four layers keep a state instead of keys and values."""

from __future__ import annotations

from llm_service.families.family import AttentionRules, Family, Mixer, NormRules, OutputGate, QkNorm, RopeRules
from llm_service.families.qwen3_vl import MODALITIES

QWEN3_5 = Family(
    MODALITIES,
    attention=AttentionRules(qk_norm=QkNorm(), output_gate=OutputGate.FUSED),
    norms=NormRules(zero_centred=True),
    rope=RopeRules(mrope_interleaved=True, partial_factor=0.25),
    mixers={"full_attention": Mixer.ATTENTION, "linear_attention": Mixer.GATED_DELTA_NET},
)
