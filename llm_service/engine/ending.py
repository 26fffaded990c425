"""How a choice ends: with an end or stop token, with its structure, or at its length. Or it cannot: its structure leads
nowhere, and its request fails."""

from __future__ import annotations

from common.errors import InvalidInput
from llm_service.engine.sequence import Sequence
from llm_service.plan import Draw


def ending(sequence: Sequence, token: int) -> str | InvalidInput:
    """Why a choice ends with the token that it has just learned: stop, structure or length; empty where it goes on."""
    matcher = sequence.matcher
    if matcher is not None:
        matcher.consume_token(token)
        if matcher.is_error():  # first of all: one that has failed allows nothing but an end token
            return _too_complex()
    if token in sequence.stop_ids:
        return "stop"
    if matcher is not None and matcher.is_stopped():
        return "structure"
    return "length" if sequence.known >= sequence.max_length else ""


def dead_end(sequence: Sequence, draw: Draw) -> InvalidInput | None:
    """Why nothing can be drawn: all that the structure allows next would end the choice before its least tokens."""
    if sequence.matcher is None or not draw.banned or _leaves_any(draw):
        return None
    if sequence.matcher.is_error():
        return _too_complex()
    return InvalidInput(
        "before min_tokens the structure of the answer allows nothing but tokens that end it",
        reason="MIN_TOKENS_UNREACHABLE",
        field="sampling.min_tokens",
    )


def _leaves_any(draw: Draw) -> bool:
    """Whether some token is allowed and not banned."""
    left = bytearray(draw.allowed)
    for token in draw.banned:
        left[token // 8] &= ~(1 << token % 8)
    return left.count(0) < len(left)


def _too_complex() -> InvalidInput:
    return InvalidInput("the structure of the answer became too complex to follow", reason="STRUCTURE_TOO_COMPLEX")
