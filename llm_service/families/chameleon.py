"""Chameleon's text. Tokens that stand for pieces of pictures are among its vocabulary, and are never said."""

from __future__ import annotations

from llm_service.families.family import FULL, Family, Mixer

CHAMELEON_TEXT = Family(
    {},
    mixers={FULL: Mixer.OWN_NORMED_ATTENTION},
    unsaid="IMGIMG",
    text_defaults={"rms_norm_eps": 1e-5},
)
