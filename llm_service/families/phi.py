"""Phi-3's text, which Phi-4 multimodal has."""

from __future__ import annotations

from llm_service.families.family import WINDOWED, AttentionRules, CheckpointNames, Family, MlpRules

PHI_TEXT = Family(
    {},
    attention=AttentionRules(fused_qkv=True),
    mlp=MlpRules(fused_gate_up=True),
    checkpoint=CheckpointNames(text_defaults={"use_sliding_window": True, "sliding_window": None}),
    mixers=WINDOWED,
)
