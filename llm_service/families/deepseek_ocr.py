"""The texts of DeepSeek-OCR 2 and of Unlimited-OCR: DeepSeek-V2's experts, and heads of the usual kind."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import FULL, OF_ANSWERS, Family, Mixer, MoeRules

DEEPSEEK_OCR2_TEXT = Family({}, moe=MoeRules(unnormalised=True, ungated_shared=True))
UNLIMITED_OCR_TEXT = replace(
    DEEPSEEK_OCR2_TEXT,
    checkpoint=replace(
        DEEPSEEK_OCR2_TEXT.checkpoint, text_defaults={"use_sliding_window": True, "sliding_window": 128}
    ),
    mixers={FULL: Mixer.ATTENTION, OF_ANSWERS: Mixer.ATTENTION},
)
