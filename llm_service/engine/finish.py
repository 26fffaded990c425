"""Why a sequence ends, or cannot go on."""

from __future__ import annotations

from common.errors import InvalidInput
from llm_service.engine.sequence import Sequence
from llm_service.plan import Draw
from llm_service.prompt_length import check_length, too_long
from llm_service.token_masks import leaves_any


def finish_reason(sequence: Sequence, token: int) -> str | InvalidInput:
    """Why a choice ends with its last token: stop, structure or length; empty if it goes on."""
    matcher = sequence.matcher
    if matcher is not None and matcher.is_error():  # first: a failed matcher allows only an end token
        return _too_complex()
    if token in sequence.stop_ids:
        return "stop"
    if matcher is not None and matcher.is_stopped():
        return "structure"
    return "length" if sequence.num_known_tokens >= sequence.max_length else ""


def resumed_end(sequence: Sequence) -> str:
    """Why a resumed choice is already complete; empty if it goes on. Raises InvalidInput if it should have ended
    earlier, or if the prompt alone is too long."""
    if not sequence.output:
        embeds = sequence.pooling is not None
        check_length(sequence.prompt_tokens, sequence.max_length - embeds, "input", answered=not embeds)
    *earlier, last = sequence.output
    if not set(sequence.stop_ids).isdisjoint(earlier):
        raise InvalidInput("an answer cannot continue after its end", reason="BAD_RESUME", field="resume")
    ended = finish_reason(sequence, last)
    if isinstance(ended, InvalidInput):
        raise ended
    return ended


def dead_end(sequence: Sequence, draw: Draw) -> InvalidInput | None:
    """Why no token can be sampled: every token that the structure and the caller allow would end the choice before
    `min_tokens`, or complete a bad word."""
    if not (draw.banned or sequence.sampling.allowed_mask) or leaves_any(draw.allowed_mask, draw.banned):
        return None
    if sequence.matcher is not None and sequence.matcher.is_error():
        return _too_complex()
    if sequence.sampling.allowed_mask:
        return InvalidInput(
            "the structure of the answer, min_tokens and bad words leave none of allowed_token_ids",
            reason="ALLOWED_TOKENS_UNREACHABLE",
            field="sampling.allowed_token_ids",
        )
    if leaves_any(draw.allowed_mask, [token for token in draw.banned if token in sequence.stop_ids]):
        return InvalidInput(
            "the structure of the answer, or of reasoning that must end, allows only tokens that complete a bad word",
            reason="BAD_WORDS_UNAVOIDABLE",
            field="sampling.bad_words",
        )
    return InvalidInput(
        "before min_tokens the structure of the answer allows only tokens that end it",
        reason="MIN_TOKENS_UNREACHABLE",
        field="sampling.min_tokens",
    )


def never_whole(rows: int) -> InvalidInput:
    """The error for a prompt with an item of so many rows, which no step can compute at once."""
    return InvalidInput(
        f"an item has {rows} rows that this model computes at once, more than a step has room for",
        reason="EMBEDDINGS_TOO_LARGE",
        field="media",
    )


def never_at_once(tokens: int, most: int) -> InvalidInput:
    """The error for a prompt that must be computed at once and has more tokens than a step."""
    why = "this model computes a whole prompt, media included, in one step, which has no room for more"
    return too_long(f"{tokens} tokens > {most} maximum; {why}", "input")


def _too_complex() -> InvalidInput:
    return InvalidInput("the structure of the answer became too complex to follow", reason="STRUCTURE_TOO_COMPLEX")
