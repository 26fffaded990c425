"""Texts whose heads share a latent: DeepSeek-V3's, which is Kimi K2.5's, and Mistral Small 4's."""

from __future__ import annotations

from dataclasses import replace

from llm_service.families.family import FULL, Family, Mixer

DEEPSEEK_V3_TEXT = Family(
    {},
    grouped_experts=True,
    ungated_shared=True,
    rotary_neighbours=True,
    mixers={FULL: Mixer.LATENT_ATTENTION},
)
MISTRAL4_TEXT = replace(DEEPSEEK_V3_TEXT, grouped_experts=False)
