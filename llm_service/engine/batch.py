"""Turns the tokens that were scheduled into a step plan: one flattened batch, with everything that the workers need."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from llm_service.engine.sequence import Sequence
from llm_service.plan import (
    Appended,
    Chunk,
    Draw,
    HiddenSum,
    PromptLogprobsAsked,
    Proposal,
    RowSlice,
    StateCopies,
    StepAdapters,
    StepPlan,
)
from llm_service.request import Pooling


@dataclass(slots=True)
class Step:
    """A plan, and the sequences that each of its parts belongs to."""

    plan: StepPlan
    work: list[tuple[Sequence, int]]
    """(sequence, tokens computed), one for each chunk."""
    drawing: list[Sequence] = field(default_factory=list)
    """The sequence of each draw of the plan; one with drafts appears once for each of its draws."""
    prompt_logprobs: list[tuple[Sequence, int]] = field(default_factory=list)
    """For each prompt logprob of the plan: its sequence, and the prompt position of its first token."""
    prefill: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """Chunks of prompts: (sequence, position of the first token, number of tokens)."""
    pooling: list[tuple[Sequence, int]] = field(default_factory=list)
    """For each pool of the plan: its sequence, and the sequence's `num_starts` when the step was planned."""
    embedded: list[Sequence] = field(default_factory=list)
    """Sequences that are pooled and end with this step, since it computes the end of their prompts."""
    unsettled: list[tuple[Sequence, Draw]] = field(default_factory=list)
    """Draws that are incomplete until the tokens of the step before are known: their mask follows, or may leave no
    token."""


def build(
    work: Mapping[Sequence, int],
    row_bytes: int,
    appended: list[Appended],
    copies: StateCopies | None = None,
    adapters: StepAdapters | None = None,
    proposals: Mapping[Sequence, int] | None = None,
) -> Step:
    """Builds the next step for these sequences; `appended` are the blocks that their tables have gained. At most one
    token of each sequence may be unknown, and the step before must choose it. Drafts are computed behind the sequence's
    last token, and a token is drawn at each of these positions. `copies` is given if the model has layers with states,
    even if nothing is copied. `proposals` says how many drafts a model proposes for each sequence."""
    plan = StepPlan(
        *(b"", b"", [], [], []),
        slots=[] if copies is None else [sequence.table.slot for sequence in work],
        states=copies or StateCopies(),
        appended=appended,
        adapters=adapters or StepAdapters(),
        proposals=[] if proposals is None else [_proposal(*each, proposals) for each in work.items()],
    )
    batch = _Batch(Step(plan, list(work.items())), row_bytes)
    for sequence, count in work.items():
        batch.add(sequence, count)
    return batch.step()


class _Batch:
    """Fills a step, sequence by sequence."""

    def __init__(self, step: Step, row_bytes: int) -> None:
        self._step, self._plan, self._row_bytes = step, step.plan, row_bytes
        self._token_ids = array("i")
        self._positions = _Positions()

    def add(self, sequence: Sequence, count: int) -> None:
        """Adds the next `count` tokens of a sequence, drafts included, and the draws, logprobs and pools that follow
        them."""
        begin, at = sequence.num_computed_tokens, len(self._token_ids)
        end = begin + count
        self._plan.rows.extend(_rows(sequence, count, at, self._row_bytes))
        if begin < sequence.prompt.whole_end:
            self._plan.whole.append((at, at + sequence.prompt.whole_end - begin))
        decodes = sequence.rolled_back or (count == 1 + len(sequence.drafts) and begin >= sequence.prompt_tokens)
        if decodes:
            self._add_decoded(sequence, begin, end)
        else:
            self._positions.window(_positions(sequence, count))
            self._token_ids.extend(sequence.tokens[begin:end])
            self._step.prefill.append((sequence, begin, count))
        answered = max(0, end - sequence.prompt_tokens)
        self._plan.chunks.append(Chunk(begin, count, sequence.table.row, decodes, min(count, answered), answered))
        if sequence.num_tokens_with_logprobs < sequence.prompt_tokens and (
            asked := _prompt_logprobs_of(sequence, count, at)
        ):
            self._plan.prompt_logprobs.append(asked)
            self._step.prompt_logprobs.append((sequence, begin + asked.at - at + 1))
        if sequence.pooling is not None:
            self._pool(sequence, sequence.pooling, begin, end, at)
        elif end == len(sequence.tokens) + len(sequence.drafts):
            self._draw(sequence, at + count - 1)

    def _add_decoded(self, sequence: Sequence, begin: int, end: int) -> None:
        for place in range(begin, end):
            self._positions.one(place + sequence.prompt.mrope_delta)
        self._token_ids.extend(sequence.tokens[begin : end - len(sequence.drafts)])
        self._token_ids.extend(sequence.drafts)

    def _pool(self, sequence: Sequence, pooling: Pooling, begin: int, end: int, at: int) -> None:
        if asked := _pool(pooling, begin, end, sequence.prompt_tokens, at):
            self._plan.pools.append(asked)
            self._step.pooling.append((sequence, sequence.num_starts))
        if end == sequence.prompt_tokens:
            self._step.embedded.append(sequence)

    def _draw(self, sequence: Sequence, last: int) -> None:
        """Adds a draw behind the last known token, and one behind each draft. `last` is the batch position of the last
        draft, or of that token if there are no drafts."""
        if sequence.num_placeholders:
            self._plan.carried.append((last, sequence.placeholder_draw))
        for ahead in range(len(sequence.drafts) + 1):
            draw = _draw(sequence, last - len(sequence.drafts) + ahead, ahead)
            self._plan.draws.append(draw)
            self._step.drawing.append(sequence)
            if draw.mask_follows or (draw.banned_behind and sequence.sampling.allowed_mask):
                self._step.unsettled.append((sequence, draw))

    def step(self) -> Step:
        """The step with all that was added."""
        tokens = {"token_ids": self._token_ids.tobytes(), "positions": self._positions.packed()}
        self._step.plan = structs.replace(self._plan, **tokens)
        return self._step


class _Positions:
    """Collects positions, int32 [3, n]. Decodes come one by one and are many; their three positions are equal."""

    def __init__(self) -> None:
        self._windows: list[np.ndarray] = []
        self._ones: list[int] = []

    def one(self, position: int) -> None:
        """A token that stands at the same place in time, height and width."""
        self._ones.append(position)

    def window(self, positions: np.ndarray) -> None:
        """int32 [3, m]"""
        self._gather()
        self._windows.append(positions)

    def _gather(self) -> None:
        if self._ones:
            self._windows.append(np.tile(np.array(self._ones, np.int32), (3, 1)))
            self._ones = []

    def packed(self) -> bytes:
        """All of them, in order."""
        self._gather()
        return np.concatenate(self._windows, axis=1).tobytes()


def _positions(sequence: Sequence, count: int) -> np.ndarray:
    """int32 [3, count]: the positions of the next `count` pending tokens."""
    begin, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
    if end <= sequence.prompt_tokens:
        return sequence.prompt.positions[:, begin:end]
    past = np.arange(max(begin, sequence.prompt_tokens), end, dtype=np.int32) + np.int32(sequence.prompt.mrope_delta)
    tail = np.broadcast_to(past, (3, len(past)))
    return np.concatenate([sequence.prompt.positions[:, begin:], tail], axis=1)


def _proposal(sequence: Sequence, count: int, proposals: Mapping[Sequence, int]) -> Proposal:
    end = sequence.num_computed_tokens + count
    following = sequence.tokens[end : end + 1]
    return Proposal(proposals.get(sequence, 0), sequence.prompt.mrope_delta, *following)


def _rows(sequence: Sequence, count: int, at: int, row_bytes: int) -> Iterator[RowSlice]:
    """The media rows that the next `count` pending tokens stand for, when they begin at place `at` of the batch.

    With 10 tokens computed and a run of rows 0–7 at positions 8–15, a window of 4 takes rows 2–5 at places 0–3.
    """
    begin, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
    if begin >= sequence.prompt.media_end:
        return
    for item in sequence.prompt.items:
        for run in item.runs:
            low, high = max(run.begin, begin), min(run.end, end)
            if low < high:
                row = run.first_row + low - run.begin
                yield RowSlice(at + low - begin, item.offset + row * row_bytes, high - low)


def _prompt_logprobs_of(sequence: Sequence, count: int, at: int) -> PromptLogprobsAsked | None:
    """Asks for the prompt's tokens that follow the next `count` pending ones, at places from `at` on, and have no
    logprobs yet.

    With 8 tokens computed and 11 with logprobs, a window of 6 asks for tokens 11 … 14 at places 2 … 5.
    """
    begin, last = sequence.num_computed_tokens, min(sequence.num_computed_tokens + count + 1, sequence.prompt_tokens)
    first = max(begin + 1, sequence.num_tokens_with_logprobs)
    if first >= last or sequence.sampling.prompt_logprobs is None:
        return None
    return PromptLogprobsAsked(
        at + first - 1 - begin, sequence.tokens[first:last].tobytes(), sequence.sampling.prompt_logprobs
    )


def _pool(pooling: Pooling, begin: int, end: int, prompt_tokens: int, at: int) -> HiddenSum | None:
    """What is asked for of a prompt's tokens [begin, end), which stand at places from `at` on.

    >>> [_pool(Pooling.LAST, begin, begin + 4, 8, 10) for begin in (0, 4)]
    [None, HiddenSum(at=13, count=1)]
    >>> [_pool(Pooling.MEAN, begin, begin + 4, 8, 10) for begin in (0, 4)]
    [HiddenSum(at=10, count=4), HiddenSum(at=10, count=4)]
    >>> [_pool(Pooling.CLS, begin, begin + 4, 8, 10) for begin in (0, 4)]
    [HiddenSum(at=10, count=1), None]
    """
    match pooling:
        case Pooling.LAST:
            return HiddenSum(at + end - begin - 1) if end == prompt_tokens else None
        case Pooling.MEAN:
            return HiddenSum(at, end - begin)
        case Pooling.CLS:
            return None if begin else HiddenSum(at)


def _draw(sequence: Sequence, at: int, ahead: int) -> Draw:
    """The parameters of the draw from the logits at batch position `at`, behind the first `ahead` drafts."""
    sampling, generated = sequence.sampling, sequence.generated + ahead
    if sequence.plain:
        return Draw(at=at)
    ends = sequence.stop_ids if generated < sampling.min_tokens else ()
    pairs = sequence.bad_pairs()
    follows = sequence.matcher is not None and sequence.num_placeholders > 0
    return Draw(
        at=at,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        uniform=0.0 if sampling.temperature == 0.0 else uniform(sequence.seed, sequence.choice, generated),
        banned=(*ends, *sequence.bad_ends(sequence.drafts[:ahead])),
        banned_behind=pairs,
        logit_bias=sampling.logit_bias,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        prompt=sequence.prompt.distinct,
        output=_said(sequence, ahead) if sampling.penalises else b"",
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        allowed_mask=b"" if follows else _allowed(sequence, ahead),
        mask_follows=follows,
        carried=sequence.placeholder_draw if sequence.num_placeholders and (pairs or sampling.penalises) else -1,
    )


def _allowed(sequence: Sequence, ahead: int) -> bytes:
    """The mask of tokens allowed behind the first `ahead` drafts; empty if all are."""
    if sequence.drafts and sequence.draft_masks:
        return sequence.draft_masks[ahead]
    return sequence.allowed_by(sequence.matcher)


def _said(sequence: Sequence, ahead: int) -> bytes:
    """int32: the output and the first `ahead` drafts."""
    said = memoryview(sequence.tokens)[sequence.prompt_tokens :].tobytes()
    return said + sequence.drafts[:ahead].tobytes() if ahead else said


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: 53 bits of their SHA-256."""
    digest = hashlib.sha256(b"%d/%d/%d" % (seed, choice, index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
