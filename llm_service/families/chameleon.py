"""Chameleon's text. Tokens that stand for pieces of pictures are among its vocabulary, and are never said."""

from __future__ import annotations

from llm_service.families.family import FULL, CheckpointNames, Family, Mixer, VocabularyRules

CHAMELEON_TEXT = Family(
    {},
    vocabulary=VocabularyRules(unsaid="IMGIMG"),
    checkpoint=CheckpointNames(text_defaults={"rms_norm_eps": 1e-5}),
    mixers={FULL: Mixer.OWN_NORMED_ATTENTION},
)
