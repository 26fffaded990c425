"""Continuous batching under a token budget: what to compute in the next step, and what follows from its result.

Decodes come first, then prefill chunks of running sequences, then waiting ones; among equals, priority, then arrival.
A chunk never passes the rows that have landed. When blocks run out, the last sequence in rank that the step does not
use gives its blocks back and is computed again later. No sequence can want more blocks than there are, so the first in
rank always finishes: there is no deadlock.
"""

from __future__ import annotations

import bisect
import secrets
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from llm_service.engine.blocks import BlockManager
from llm_service.engine.messages import Add, Failed, Started, State, Token
from llm_service.engine.sequence import Sequence
from llm_service.engine.structure import Matcher
from llm_service.plan import Chunk, Draw, RowSlice, StepPlan, StepResult

_INVALID_ARGUMENT = 3
_DEADLINE_EXCEEDED = 4
_TOO_COMPLEX = "the structure of the answer became too complex to follow"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine: sequences at once, tokens a step, tokens a sequence."""

    max_running: int
    max_step_tokens: int
    max_context: int


@dataclass(slots=True)
class Step:
    """A plan and whom it is for: (sequence, tokens computed), and the sequences that get a token, in draw order."""

    plan: StepPlan
    work: list[tuple[Sequence, int]]
    drawing: list[Sequence]


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(slots=True)
class Scheduler:
    """Owns the sequences and, through `blocks`, their KV blocks. `eos` are the model's end tokens; `match` gives a
    matcher for a grammar."""

    blocks: BlockManager
    limits: Limits
    eos: frozenset[int]
    row_bytes: int
    match: Callable[[str], Matcher] | None = None
    counters: Counters = field(default_factory=Counters)
    _failures: list[Failed] = field(default_factory=list)
    _waiting: list[Sequence] = field(default_factory=list)
    _running: list[Sequence] = field(default_factory=list)
    _requests: dict[int, list[Sequence]] = field(default_factory=dict)
    _ended_requests: list[int] = field(default_factory=list)
    _arrivals: int = 0

    # --- what comes in -------------------------------------------------------------------------------------------

    def add(self, add: Add) -> None:
        """Takes a request in. The front has checked that it fits the context."""
        self._arrivals += 1
        sequences = Sequence.of(add, arrival=self._arrivals, seed=secrets.randbits(64))
        if add.sampling.grammar and self.match is not None:
            for sequence in sequences:
                sequence.matcher = self.match(add.sampling.grammar)
        self._requests[add.id] = sequences
        for sequence in sequences:
            bisect.insort(self._waiting, sequence, key=_rank)
        self.counters.prompt_tokens += sequences[0].prompt_tokens

    def landed(self, id: int, item: int, rows: int) -> None:
        """The first `rows` rows of an item are in the arena."""
        for sequence in self._requests.get(id, [])[:1]:
            sequence.items[item].landed = max(sequence.items[item].landed, rows)

    def abort(self, id: int, choice: int = -1) -> None:
        """Ends a request, or one choice of it; unknown ones are skipped."""
        for sequence in list(self._requests.get(id, ())):
            if choice in (-1, sequence.choice):
                self._end(sequence)

    def expire(self, now: float) -> None:
        """Fails every request whose deadline has passed by `now`, on the monotonic clock."""
        for id, (first, *_) in list(self._requests.items()):
            if first.deadline is not None and first.deadline <= now:
                self._fail(id, _DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline passed while generating")

    def take_failures(self) -> list[Failed]:
        """The requests that failed since the last call; they are among `take_ended` as well."""
        failures, self._failures = self._failures, []
        return failures

    def _fail(self, id: int, code: int, reason: str, message: str) -> None:
        if id in self._requests:
            self.abort(id)
            self._failures.append(Failed(id, code, reason, message))

    def next_deadline(self) -> float | None:
        """The earliest deadline of all requests."""
        return min((s[0].deadline for s in self._requests.values() if s[0].deadline is not None), default=None)

    def state(self) -> State:
        """Queues and counters."""
        counters = self.counters
        return State(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_blocks_used=self.blocks.used,
            kv_blocks_total=self.blocks.total,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
        )

    # --- what to compute -----------------------------------------------------------------------------------------

    def schedule(self) -> tuple[Step | None, list[Started]]:
        """The next step, or None where nothing can be computed now; and the requests that it starts."""
        work: list[tuple[Sequence, int]] = []
        budget = self.limits.max_step_tokens
        for sequence in sorted(self._running, key=lambda s: (s.pending > 1, s.rank, s.choice)):
            count = min(sequence.ready(), budget)
            if count and sequence in self._running and self._make_room(sequence, count, work):
                work.append((sequence, count))
                budget -= count
        started: list[Started] = []
        for sequence in list(self._waiting):
            if not budget or len(self._running) >= self.limits.max_running:
                break
            if sequence.blocked:
                continue
            if not self._admit(sequence):
                break
            if count := min(sequence.ready(), budget):
                self.blocks.grow(sequence.table, sequence.computed + count)
                self._waiting.remove(sequence)
                self._running.append(sequence)
                started.extend(self._announce(sequence))
                work.append((sequence, count))
                budget -= count
            else:  # its next row has not landed: others may go first
                self._release(sequence)
        return (self._build(work) if work else None), started

    def _make_room(self, sequence: Sequence, count: int, work: list[tuple[Sequence, int]]) -> bool:
        """Grows a running sequence's table by `count` tokens, at the cost of those behind it that the step spares."""
        used = {id(planned) for planned, _ in work}
        while not self.blocks.grow(sequence.table, sequence.computed + count):
            behind = [s for s in self._running if _rank(s) > _rank(sequence) and id(s) not in used and s.table.blocks]
            if not behind:
                return False
            self._preempt(max(behind, key=_rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        bisect.insort(self._waiting, sequence, key=_rank)
        self.counters.preemptions += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its cached blocks if, with them, all its tokens could be held now.

        The last token is always computed, since its logits are needed.
        """
        size = self.blocks.block_size
        identities = sequence.identities((len(sequence.tokens) - 1) // size, size)
        hits = self.blocks.match(identities)
        self.blocks.adopt(sequence.table, identities[:hits])
        if not self.blocks.can_grow(sequence.table, len(sequence.tokens)):
            self._release(sequence)
            return False
        sequence.computed = hits * size
        return True

    def _announce(self, sequence: Sequence) -> Iterable[Started]:
        if not sequence.started:
            sequence.started = True
            self.counters.prefix_hit_tokens += sequence.computed
            if sequence.choice == 0:
                yield Started(sequence.id, sequence.computed)

    def _build(self, work: list[tuple[Sequence, int]]) -> Step:
        token_ids, positions = array("i"), []
        chunks: list[Chunk] = []
        rows: list[RowSlice] = []
        draws: list[Draw] = []
        drawing: list[Sequence] = []
        for sequence, count in work:
            at, end = len(token_ids), sequence.computed + count
            rows.extend(sequence.window_rows(count, at, self.row_bytes))
            positions.append(sequence.window_positions(count))
            token_ids.extend(sequence.tokens[sequence.computed : end])
            chunks.append(Chunk(sequence.computed, count, sequence.table.blocks[: self.blocks.blocks_for(end)]))
            if end == len(sequence.tokens):
                draws.append(sequence.draw(at + count - 1, self._ends(sequence)))
                drawing.append(sequence)
        flat = np.ascontiguousarray(np.concatenate(positions, axis=1))
        return Step(StepPlan(token_ids.tobytes(), flat.tobytes(), chunks, rows, draws), work, drawing)

    def _ends(self, sequence: Sequence) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        own = () if sequence.sampling.ignore_eos else tuple(sorted(self.eos))
        return own + sequence.sampling.stop_token_ids

    # --- what follows --------------------------------------------------------------------------------------------

    def finish(self, step: Step, result: StepResult) -> list[Token]:
        """Takes in the result of a step: KV is computed, tokens are appended, ended sequences give everything back."""
        self.counters.steps += 1
        size = self.blocks.block_size
        for sequence, count in step.work:
            sequence.computed += count
            full = sequence.computed // size
            for identity in sequence.identities(full, size)[len(sequence.table.identities) :]:
                self.blocks.commit(sequence.table, identity)
        tokens: list[Token] = []
        lost: list[int] = []
        for sequence, token, logprobs in zip(step.drawing, result.tokens, result.logprobs, strict=True):
            sequence.tokens.append(token)
            self.counters.generated_tokens += 1
            if sequence.matcher is not None:
                sequence.matcher.consume_token(token)
            ended = self._ended(sequence, token)
            tokens.append(Token(sequence.id, sequence.choice, token, ended, logprobs))
            if ended:
                self._end(sequence)
            elif sequence.matcher is not None and sequence.matcher.is_error():
                lost.append(sequence.id)
        for id in lost:
            self._fail(id, _INVALID_ARGUMENT, "STRUCTURE_TOO_COMPLEX", _TOO_COMPLEX)
        return tokens

    def take_ended(self) -> list[int]:
        """The requests that are gone since the last call: no later plan reads their rows."""
        ended, self._ended_requests = self._ended_requests, []
        return ended

    def _ended(self, sequence: Sequence, token: int) -> str:
        if token in self._ends(sequence):
            return "stop"
        if sequence.matcher is not None and sequence.matcher.is_stopped() and not sequence.matcher.is_error():
            return "structure"
        full = len(sequence.tokens) >= self.limits.max_context
        return "length" if full or sequence.generated >= sequence.sampling.max_tokens else ""

    def _end(self, sequence: Sequence) -> None:
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        self._release(sequence)
        siblings = self._requests[sequence.id]
        siblings.remove(sequence)
        for sibling in siblings:
            if sibling.after is sequence:  # the prompt is computed, or never will be: the next choice does it itself
                sibling.after = None
        if not siblings:
            del self._requests[sequence.id]
            self._ended_requests.append(sequence.id)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.table)
        sequence.computed = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or held by a sequence that is waiting or running."""
        everyone = [*self._waiting, *self._running]
        assert not any(sequence.table.blocks for sequence in self._waiting), "a waiting sequence holds blocks"
        assert sorted(map(id, everyone)) == sorted(id(s) for group in self._requests.values() for s in group)
        self.blocks.check_integrity([sequence.table for sequence in everyone])


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return (*sequence.rank, sequence.choice)
