"""A configuration's settings of the token table, the head of logits, and multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import Family


def tied_of(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> bool:
    """Whether the head is the token table. Raises CheckpointError if it cannot be."""
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    if tied and family.vocabulary.normed_embeddings:
        raise CheckpointError("a head that is tied to embeddings which are normed is not supported")
    return tied


def unsaid_tokens(text: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """See `TextConfig.unsaid`."""
    named = (text.get("vocabulary_map") or {}) if family.vocabulary.unsaid else {}
    return tuple(sorted(int(token) for name, token in named.items() if name.startswith(family.vocabulary.unsaid)))


def table_rows(text: Mapping[str, Any]) -> int:
    """See `TextConfig.table_rows`."""
    more = int(text.get("additional_vocab_size") or 0)
    return int(text["vocab_size"]) + more if more else 0


def multiplier(text: Mapping[str, Any], name: str) -> float:
    """The setting with this name; 1 if it is missing."""
    found = float(text.get(name) or 1.0)
    if found < 0:
        raise CheckpointError(f"a {name} below 0 is not supported")
    return found


def logit_scale(text: Mapping[str, Any], family: Family) -> float:
    """The factor of logits."""
    return multiplier(text, family.vocabulary.logit_scale) / multiplier(text, family.vocabulary.logit_divisor)
