"""ERNIE 4.5's text: experts by modality; rotary pairs of height and width alternate, before those of time."""

from __future__ import annotations

from llm_service.families.family import CheckpointNames, Family, FeedForwardKind, MoeRules, RopeRules

ERNIE_TEXT = Family(
    {},
    rope=RopeRules(interleaved=True, mrope_space_first=True),
    moe=MoeRules(kind=FeedForwardKind.BY_MODALITY),
    checkpoint=CheckpointNames(
        text_defaults={"mrope_section": (22, 22, 20)}, changed_parts=("mlp.gate.", "mlp.moe_statics.")
    ),
)
