"""Token ids that callers give."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvalidInput


def check_token_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raises InvalidInput if a token is not in the model's vocabulary."""
    if any(not 0 <= token < vocab_size for token in ids):
        raise InvalidInput("a token id is outside the vocabulary", reason="TOKEN_OUT_OF_RANGE", field=field)
