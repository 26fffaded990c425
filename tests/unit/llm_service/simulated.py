"""An engine without a model: the real scheduler over an executor whose KV cache holds hashes of what was computed.

A slot holds a hash of everything up to its token: tokens, positions and media rows. A token is chosen from that hash,
so what a request says is a function of its prompt alone, which `expected` gives without any cache or batch. A block
that is shared, evicted or rewritten wrongly, a row that is read too early, or a chunk at the wrong place changes it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from llm_service.engine.blocks import BlockManager
from llm_service.engine.messages import NOWHERE, Add, Failed, ItemRows, Token
from llm_service.engine.scheduler import Limits, Scheduler, Step
from llm_service.engine.structure import Matcher
from llm_service.engine.window import uniform
from llm_service.plan import Draw, RowSlice, StepPlan, StepResult, TokenLogprobs
from llm_service.request import Sampling

ROW_BYTES = 64
VOCABULARY = 31
EOS = 0
PAD = 30
"""The placeholder of a media row, which no text holds."""

_ARENA_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Picture:
    """`rows` rows of picture `name`, standing at prompt positions `start`…; its rows may be cut into `runs`."""

    name: int
    start: int
    rows: int
    runs: tuple[int, ...] = ()

    @property
    def key(self) -> bytes:
        return hashlib.sha256(b"picture %d" % self.name).digest()

    @property
    def offset(self) -> int:
        return self.name * _ARENA_ROWS * ROW_BYTES

    def placed(self) -> list[tuple[int, int, int]]:
        """(start, first row, count) of each run, with one text token between two runs."""
        out, start, first = [], self.start, 0
        for count in self.runs or (self.rows,):
            out.append((start, first, count))
            start, first = start + count + 1, first + count
        return out


@dataclass(frozen=True, slots=True)
class Order:
    """A request as tests write it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    pictures: tuple[Picture, ...] = ()
    salt: str = ""
    priority: int = 0
    deadline: float | None = None

    def rows_at(self) -> dict[int, int]:
        """The arena row at each media position."""
        return {
            start + n: picture.offset // ROW_BYTES + first + n
            for picture in self.pictures
            for start, first, count in picture.placed()
            for n in range(count)
        }


@dataclass(slots=True)
class Outcome:
    """What a request has said so far: tokens and the reason of each choice, and how it failed."""

    order: Order
    tokens: list[list[int]]
    ended: list[str]
    failed: str = ""
    aborted: bool = False
    released: int = 0
    started: int = 0
    cached: int = 0
    scored: list[TokenLogprobs] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return bool(self.failed) or self.aborted or all(self.ended)


@dataclass(slots=True)
class HashExecutor:
    """Runs plans on a KV cache of hashes. `landed` says how many rows of each picture are in the arena."""

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    beat_seconds: float | None = None

    def beat(self) -> None:
        """There is no one to keep company."""

    def run(self, plan: StepPlan) -> StepResult:
        tokens = np.frombuffer(plan.token_ids, np.int32).tolist()
        positions = np.frombuffer(plan.positions, np.int32).reshape(3, -1).tolist()
        rows = self._rows(plan.rows)
        hashes: list[int] = []
        for chunk in plan.chunks:
            assert len(chunk.blocks) * self.block_size >= chunk.context + chunk.count
            before = self.slots[self._slot(chunk.blocks, chunk.context - 1)] if chunk.context else 0
            for n in range(chunk.count):
                at, index = len(hashes), chunk.context + n
                assert {line[at] for line in positions} == {index}
                before = _extend(before, tokens[at], rows.pop(at, -1))
                self.slots[self._slot(chunk.blocks, index)] = before
                hashes.append(before)
        assert len(hashes) == len(tokens)
        assert not rows, "rows for places that are not in the batch"
        tokens = [_choose(hashes[draw.at], draw) for draw in plan.draws]
        scores = [
            [_likely(hashes[asked.at + n], target) for n, target in enumerate(array("i", asked.targets))]
            for asked in plan.scores
        ]
        return StepResult(tokens, [None] * len(tokens), scores)

    def _slot(self, blocks: list[int], index: int) -> int:
        return blocks[index // self.block_size] * self.block_size + index % self.block_size

    def _rows(self, slices: list[RowSlice]) -> dict[int, int]:
        out: dict[int, int] = {}
        for piece in slices:
            first, odd = divmod(piece.offset, ROW_BYTES)
            picture, row = divmod(first, _ARENA_ROWS)
            assert not odd
            assert row + piece.count <= self.landed.get(picture, 0), "a row was read before it landed"
            out.update({piece.at + n: first + n for n in range(piece.count)})
        return out


def _extend(before: int, token: int, row: int) -> int:
    return hash((before, token, row))


def _likely(value: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(float(hash((value, token)) % 1009), [])


def _choose(value: int, draw: Draw) -> int:
    """A token that depends on everything that a real draw depends on."""
    seen = hash((value, draw.history, draw.output_from) if draw.history else value)
    allowed = int.from_bytes(draw.allowed or b"\xff" * 4, "little")
    words = [word for word in range(PAD) if word not in draw.banned and allowed >> word & 1]
    return words[int((seen % 1009 / 1009 + draw.uniform) * len(words)) % len(words)]


@dataclass(slots=True)
class Alternating:
    """A structure as the scheduler sees one: an odd word follows an even one; 13 completes it, 11 is too much."""

    last: int = 0

    def compute_bitmask(self) -> bytes:
        return (0x2AAAAAAA if self.last % 2 == 0 else 0x15555555).to_bytes(4, "little")

    def consume_token(self, token: int) -> bool:
        self.last = token
        return True

    def is_stopped(self) -> bool:
        return self.last in (11, 13)

    def is_error(self) -> bool:
        return self.last == 11


def _alternating(_: str) -> Future[Matcher]:
    made: Future[Matcher] = Future()
    made.set_result(Alternating())
    return made


def expected(order: Order, choice: int, limits: Limits) -> tuple[list[int], str]:
    """What a choice must say, and why it ends; for greedy or seeded requests."""
    sampling, rows = order.sampling, order.rows_at()
    value = 0
    for index, token in enumerate(order.prompt):
        value = _extend(value, token, rows.get(index, -1))
    matcher = Alternating() if sampling.grammar else None
    ends = (() if sampling.ignore_eos else (EOS,)) + sampling.stop_token_ids
    out: list[int] = []
    while True:
        chance = 0.0 if sampling.greedy else uniform(sampling.seed or 0, choice, len(out))
        banned = ends if len(out) < sampling.min_tokens else ()
        history = array("i", [*order.prompt, *out]).tobytes() if sampling.needs_history else b""
        allowed = matcher.compute_bitmask() if matcher else b""
        start = len(order.prompt)
        draw = Draw(at=0, uniform=chance, banned=banned, history=history, output_from=start, allowed=allowed)
        token = _choose(value, draw)
        if matcher:
            matcher.consume_token(token)
        if token not in ends and matcher and matcher.is_error():
            return out, "failed"
        out.append(token)
        if token in ends:
            return out, "stop"
        if matcher and matcher.is_stopped():
            return out, "structure"
        if len(out) == sampling.max_tokens or len(order.prompt) + len(out) >= limits.max_context:
            return out, "length"
        value = _extend(value, token, -1)


def expected_scores(order: Order) -> list[TokenLogprobs]:
    """How likely the prompt's tokens must be, from the second on."""
    rows, value, out = order.rows_at(), 0, []
    for index, token in enumerate(order.prompt):
        if index:
            out.append(_likely(value, token))
        value = _extend(value, token, rows.get(index, -1))
    return out


class Simulation:
    """A scheduler, its executor, and a record of every request. `step` checks what a step may never do."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        max_running: int,
        step_tokens: int,
        prefix_cache: bool = True,
        keep_media_whole: bool = False,
        overlap: bool = False,
    ) -> None:
        self.limits = Limits(max_running, step_tokens, blocks * block_size, keep_media_whole)
        manager = BlockManager(blocks, block_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(manager, self.limits, frozenset({EOS}), ROW_BYTES, _alternating)
        self.executor = HashExecutor(block_size)
        self.outcomes: dict[int, Outcome] = {}
        self.steps = 0
        self.computed = 0
        self._depth = 2 if overlap else 1
        self.wanted: list[int] = []
        self._under_way: deque[Step] = deque()
        self._chosen: list[int] = []

    def submit(self, order: Order, nowhere: int = 0) -> int:
        """A new request, the first `nowhere` of whose pictures have no place in the arena."""
        id = len(self.outcomes) + 1
        n = order.sampling.n
        self.outcomes[id] = Outcome(order, [[] for _ in range(n)], [""] * n)
        self.scheduler.add(
            Add(
                id=id,
                token_ids=array("i", order.prompt).tobytes(),
                positions=np.tile(np.arange(len(order.prompt), dtype=np.int32), (3, 1)).tobytes(),
                delta=0,
                items=[
                    ItemRows(p.key, NOWHERE if number < nowhere else p.offset, p.placed(), 0)
                    for number, p in enumerate(order.pictures)
                ],
                sampling=order.sampling,
                salt=order.salt,
                priority=order.priority,
                deadline=order.deadline,
            )
        )
        return id

    def place(self, id: int, *landed: int) -> None:
        """Gives a request that wants them places for all its pictures, with so many rows of each there, or all."""
        self.wanted.remove(id)
        pictures = self.outcomes[id].order.pictures
        here = [min(rows, picture.rows) for rows, picture in zip(landed, pictures, strict=False)]
        here += [picture.rows for picture in pictures[len(here) :]]
        for picture, rows in zip(pictures, here, strict=True):
            self.executor.landed[picture.name] = max(rows, self.executor.landed.get(picture.name, 0))
        self.scheduler.placed(id, [(p.offset, rows) for p, rows in zip(pictures, here, strict=True)])

    def _give_back(self, id: int) -> None:
        """The request has none of its places any more: what no other one has may be overwritten."""
        self.wanted.append(id)
        others = [o for other, o in self.outcomes.items() if other != id and not (o.over and o.released)]
        kept = {picture.name for outcome in others for picture in outcome.order.pictures}
        for picture in self.outcomes[id].order.pictures:
            if picture.name not in kept:
                self.executor.landed[picture.name] = 0

    def land(self, id: int, item: int, rows: int) -> None:
        """Rows up to `rows` of an item are in the arena, and the request is told; unless it waits for places."""
        if id in self.wanted:
            return
        picture = self.outcomes[id].order.pictures[item]
        here = max(rows, self.executor.landed.get(picture.name, 0))
        self.executor.landed[picture.name] = here
        self.scheduler.landed(id, item, rows)

    def land_all(self, id: int) -> None:
        for item, picture in enumerate(self.outcomes[id].order.pictures):
            self.land(id, item, picture.rows)

    def abort(self, id: int) -> None:
        self.outcomes[id].aborted = True
        self.scheduler.abort(id)

    def abort_choice(self, id: int, choice: int) -> None:
        self.outcomes[id].ended[choice] = self.outcomes[id].ended[choice] or "aborted"
        self.scheduler.abort(id, choice)

    def expire(self, now: float) -> None:
        self.scheduler.expire(now)
        for event in self.scheduler.take_failures():
            self._fail(event)

    def _fail(self, event: Failed) -> None:
        outcome = self.outcomes[event.id]
        assert not outcome.over, "a request failed after its end"
        outcome.failed = event.reason

    def step(self, *, check: bool = True) -> Step | None:
        """One turn of the engine's loop; None where there was nothing to compute."""
        step, started = self.scheduler.schedule()
        for event in started:
            outcome = self.outcomes[event.id]
            outcome.started += 1
            outcome.cached = event.cached
        if step is not None:
            self._check_plan(step)
            self._under_way.append(step)
        if len(self._under_way) == self._depth or (step is None and self._under_way):
            step = self._compute()
        for event in self.scheduler.take_failures():
            self._fail(event)
        for wanted in self.scheduler.take_wanted():
            self._give_back(wanted.id)
        for id in self.scheduler.take_ended():
            self.outcomes[id].released += 1
        if check:
            self.scheduler.check_integrity()
        return step

    def _compute(self) -> Step:
        """Computes the oldest step under way, as late as a real engine may: after later ones were planned."""
        step = self._under_way.popleft()
        assert not any(self.outcomes[sequence.id].released for sequence, _ in step.work), (
            "a step for a released request"
        )
        result = self.executor.run(step.plan.filled(self._chosen))
        self._chosen = result.tokens
        tokens = self.scheduler.finish(step, result)
        for scored in self.scheduler.take_scored():
            outcome = self.outcomes[scored.id]
            assert not outcome.over
            assert not outcome.tokens[0], "a score after the first token"
            assert scored.first == len(outcome.scored) + 1, "scores come in order, each once"
            outcome.scored.extend(scored.logprobs)
        for token in tokens:
            self._take(token)
        self.steps += 1
        self.computed += step.plan.tokens
        return step

    def _check_plan(self, step: Step) -> None:
        assert step.work, "a step that computes nothing"
        assert step.plan.tokens == sum(count for _, count in step.work) <= self.limits.max_step_tokens
        assert len(step.work) <= self.limits.max_running
        assert len({(s.id, s.choice) for s, _ in step.work}) == len(step.work), "a sequence stands twice in a step"
        assert self.scheduler.state().running <= self.limits.max_running

    def _take(self, token: Token) -> None:
        outcome = self.outcomes[token.id]
        assert not outcome.failed, "a token after the end of its request"
        assert not outcome.aborted, "a token after the end of its request"
        assert not outcome.ended[token.choice], "a token after the end of its choice"
        outcome.tokens[token.choice].append(token.token)
        outcome.ended[token.choice] = token.ended

    def drain(self, *, check: bool = True) -> None:
        """Lands everything and runs until all requests have ended; fails where that takes impossibly long."""
        for id, outcome in self.outcomes.items():
            if not outcome.over:
                self.land_all(id)
        work = sum((len(o.order.prompt) + o.order.sampling.max_tokens) * len(o.tokens) for o in self.outcomes.values())
        for _ in range(10 * work + 10):
            for id in tuple(self.wanted):
                self.place(id)
            if self.step(check=check) is None and not self.wanted:
                break
        self.check_over()

    def check_over(self) -> None:
        """Every request has ended once and said what its prompt makes it say; nothing is held."""
        for outcome in self.outcomes.values():
            assert outcome.over, "a request never ended"
            assert outcome.released == 1, "a request was let go more than once, or never"
            assert outcome.started <= 1, "a request started twice"
            self._check_words(outcome)
        assert self.scheduler.blocks.used == 0
        assert (self.scheduler.state().waiting, self.scheduler.state().running) == (0, 0)
        self.scheduler.check_integrity()

    def _check_words(self, outcome: Outcome) -> None:
        if outcome.order.sampling.prompt_logprobs is not None:
            wanted_scores = expected_scores(outcome.order)
            assert outcome.scored == wanted_scores[: len(outcome.scored)]
            assert not outcome.tokens[0] or len(outcome.scored) == len(wanted_scores)
        if not outcome.order.sampling.greedy and outcome.order.sampling.seed is None:
            return
        for choice, said in enumerate(outcome.tokens):
            wanted, reason = expected(outcome.order, choice, self.limits)
            assert said == wanted[: len(said)]
            if outcome.ended[choice] in ("stop", "length", "structure"):
                assert (said, outcome.ended[choice]) == (wanted, reason)
