"""Models without a family of ours: transformers computes them, and encoders say how an item is laid out in a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from common.hf.description import HfModel
from common.media.item import Header, Modality
from llm_service.families.family import Family, InPrompt, PromptRules, Rows, SpecialToken


def _as_told(header: Header) -> Iterator[str | SpecialToken | Rows]:
    for part in header.replacement:
        if part.text:
            yield part.text
        if part.has_run:
            yield Rows(part.rows, part.token)


def hf_family(found: HfModel) -> Family:
    """The family of a model that transformers computes."""
    tokens = {Modality(name): token for name, token in found.placeholders.items()}
    return Family(
        {modality: InPrompt(token, _as_told) for modality, token in tokens.items()},
        encoder=found.encoder,
        prompt=PromptRules(
            layout_from_encoder=True,
            alone=frozenset(map(Modality, found.alone)),
            duration_mark=found.duration_mark,
            seam=found.seam,
            number_mark=found.number_mark,
            placeholder_run=found.run,
            long_rope_threshold=found.long_rope_threshold,
            pinned_tokens=frozenset(found.pinned),
            frame=found.frame,
        ),
    )
