"""Phi-3's text, which Phi-4 multimodal has."""

from __future__ import annotations

from llm_service.families.family import WINDOWED, Family

PHI_TEXT = Family(
    {},
    fused_heads=True,
    fused_gates=True,
    mixers=WINDOWED,
    text_defaults={"use_sliding_window": True, "sliding_window": None},
)
