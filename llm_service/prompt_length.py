"""Whether a prompt is short enough for a context."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvalidInput


def check_length(tokens: int, context: int, field: str, *, answered: bool = True) -> None:
    """Raises InvalidInput, in the words that clients of OpenAI's and Anthropic's APIs know it by, for a prompt of more
    tokens than the context holds, an answer's first one included."""
    if tokens > (most := context - answered):
        raise too_long(
            f"{tokens} tokens > {most} maximum; this model's maximum context length is {context} tokens"
            f"{', output included' if answered else ''}",
            field,
        )


def check_bytes(texts: Iterable[str], most: int, field: str) -> None:
    """Raises that error for a prompt whose texts are too long for counting their tokens."""
    if (size := sum(len(text.encode()) for text in texts)) > most:
        raise too_long(f"{size} bytes of text > {most} maximum", field)


def too_long(why: str, field: str) -> InvalidInput:
    """Refuses a prompt for its length."""
    return InvalidInput(f"prompt is too long: {why}", reason="PROMPT_TOO_LONG", field=field)
