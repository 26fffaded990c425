"""ERNIE 4.5's text: experts by modality, and rotary pairs of height and width in turns before those of time."""

from __future__ import annotations

from llm_service.families.family import Family, FeedForwardKind

ERNIE_TEXT = Family(
    {},
    rotary_neighbours=True,
    space_first=True,
    text_defaults={"mrope_section": (22, 22, 20)},
    sparse=FeedForwardKind.BY_MODALITY,
    changed_parts=("mlp.gate.", "mlp.moe_statics."),
)
