"""What a plan says of the next pending tokens of a sequence: where they stand, which rows they are, what is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from llm_service.engine.sequence import Sequence
from llm_service.plan import Draw, RowSlice, Score


def positions(sequence: Sequence, count: int) -> np.ndarray:
    """int32 [3, count]: the positions of the next `count` pending tokens."""
    begin, end = sequence.computed, sequence.computed + count
    if end <= sequence.prompt_tokens:
        return sequence.positions[:, begin:end]
    past = np.arange(max(begin, sequence.prompt_tokens), end, dtype=np.int32) + np.int32(sequence.delta)
    tail = np.broadcast_to(past, (3, len(past)))
    return np.concatenate([sequence.positions[:, begin:], tail], axis=1)


def rows(sequence: Sequence, count: int, at: int, row_bytes: int) -> Iterator[RowSlice]:
    """The media rows that the next `count` pending tokens stand for, when they begin at place `at` of the batch.

    With 10 tokens computed and a run of rows 0–7 at positions 8–15, a window of 4 takes rows 2–5 at places 0–3.
    """
    begin, end = sequence.computed, sequence.computed + count
    if begin >= sequence.media_end:
        return
    for item in sequence.items:
        for start, first_row, length in item.runs:
            low, high = max(start, begin), min(start + length, end)
            if low < high:
                row = first_row + low - start
                yield RowSlice(at + low - begin, item.offset + row * row_bytes, high - low)


def score(sequence: Sequence, count: int, at: int) -> Score | None:
    """Asks for the prompt's tokens that follow the next `count` pending ones, at places from `at` on, and have not
    been scored; they then count as scored.

    With 8 tokens computed and 11 scored, a window of 6 asks for tokens 11 … 14 at places 2 … 5.
    """
    begin, last = sequence.computed, min(sequence.computed + count + 1, sequence.prompt_tokens)
    first = max(begin + 1, sequence.scored)
    if first >= last or sequence.sampling.prompt_logprobs is None:
        return None
    sequence.scored = last
    return Score(at + first - 1 - begin, sequence.tokens[first:last].tobytes(), sequence.sampling.prompt_logprobs)


def draw(sequence: Sequence, at: int) -> Draw:
    """How the next token is to be chosen from the logits at place `at`."""
    sampling = sequence.sampling
    if sequence.plain:
        return Draw(at=at)
    return Draw(
        at=at,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        uniform=0.0 if sampling.temperature == 0.0 else uniform(sequence.seed, sequence.choice, sequence.generated),
        banned=sequence.stop_ids if sequence.generated < sampling.min_tokens else (),
        logit_bias=sampling.logit_bias,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        prompt=sequence.penalised,
        output=sequence.tokens[sequence.prompt_tokens :].tobytes() if sampling.penalises else b"",
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        allowed=b"" if sequence.matcher is None else sequence.matcher.compute_bitmask(),
        carried=sequence.drawn if sequence.unknown and sampling.penalises else -1,
    )


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: 53 bits of their SHA-256."""
    digest = hashlib.sha256(b"%d/%d/%d" % (seed, choice, index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
