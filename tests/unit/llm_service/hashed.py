"""A model that tests can foresee: its KV cache holds hashes of what was computed.

A slot holds a hash of everything up to its token, or of the whole prompt where all of it is seen: tokens, positions,
media rows, the adapter. A token is chosen from
that hash, so what a request says is a function of its prompt and adapter alone, which `expected` gives without any
cache or batch. A block that is shared, evicted or rewritten wrongly, a row that is read too early, a slot with another
adapter, or a chunk at the wrong place changes it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from llm_service.engine.batch import uniform
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.matchers import Matcher
from llm_service.plan import Chunk, Draw, RowSlice, StepPlan, StepResult, TokenLogprobs
from llm_service.request import MediaRun, Pooling, SamplingParams

ROW_BYTES = 64
VOCABULARY = 31
EOS = 0
PAD = 30
"""The placeholder of a media row, which no text holds."""
_WORDS = range(PAD)

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

    def placed(self) -> tuple[MediaRun, ...]:
        """Its runs, with one text token between two of them."""
        out, start, first = [], self.start, 0
        for count in self.runs or (self.rows,):
            out.append(MediaRun(start, first, count))
            start, first = start + count + 1, first + count
        return tuple(out)


@dataclass(frozen=True, slots=True)
class Order:
    """A request as tests write it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    pictures: tuple[Picture, ...] = ()
    salt: str = ""
    priority: int = 0
    deadline: float | None = None
    session: int = 0
    adapter: int = 0
    pooling: Pooling | None = None

    def rows_at(self) -> dict[int, int]:
        """The arena row at each media position."""
        return {
            run.begin + n: picture.offset // ROW_BYTES + run.first_row + n
            for picture in self.pictures
            for run in picture.placed()
            for n in range(run.count)
        }


@dataclass(slots=True)
class HashExecutor:
    """Runs plans on a KV cache of hashes. `landed` says how many rows of each picture are in the arena; `states` has
    what a layer with a state would have in each slot: the hash of the last token."""

    block_size: int
    forgets_answers: bool = False
    states: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    adapters: dict[int, int] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        self._copy(plan)
        tokens = np.frombuffer(plan.token_ids, np.int32).tolist()
        positions = np.frombuffer(plan.positions, np.int32).reshape(3, -1).tolist()
        rows, whole = self._rows(plan.rows), dict(plan.whole)
        hashes: list[int] = []
        for source, target in plan.states.before:
            self.states[target] = self.states[source]
        for each in plan.appended:
            before = self.tables[each.row] if each.begin else []
            assert len(before) == each.begin, "a table goes on where it ended"
            self.tables[each.row] = [*before, *array("i", each.blocks)]
        for slot, adapter in plan.adapters.filled:
            self.adapters[slot] = adapter
        for number, chunk in enumerate(plan.chunks):
            blocks = self.tables[chunk.row]
            slot = plan.adapters.slots[number] if plan.adapters.slots else -1
            adapter = self.adapters[slot] if slot >= 0 else 0
            assert len(blocks) * self.block_size >= chunk.context + chunk.count
            first = chunk.context
            before = self.slots[self._slot(blocks, first - 1)] if first else 0
            if end := whole.pop(len(hashes), 0):
                assert end <= len(hashes) + chunk.count, "the rest of a prompt is computed at once"
                if not first:  # else the one before it was computed with all of them as well
                    before = _all_of([(tokens[at], rows.get(at, -1)) for at in range(len(hashes), end)])
            assert not (plan.slots and chunk.context) or self.states[plan.slots[number]] == before, "another's state"
            for n in range(chunk.count):
                at, index = len(hashes), chunk.context + n
                assert {line[at] for line in positions} == {index}
                before = _extend(before, tokens[at], rows.pop(at, -1), adapter, self._turn(chunk, n))
                self.slots[self._slot(blocks, index)] = before
                hashes.append(before)
                self.states |= {
                    slot: before for owner, count, slot in plan.states.within if (owner, count) == (number, n + 1)
                }
            if plan.slots:
                self.states[plan.slots[number]] = before
        for source, target in plan.states.after:
            self.states[target] = self.states[source]
        assert len(hashes) == len(tokens)
        assert not rows, "rows for places that are not in the batch"
        assert not whole, "prompts that are not in the batch"
        tokens = [_choose(hashes[draw.at], draw) for draw in plan.draws]
        scores = [
            [_likely(hashes[asked.at + n], target) for n, target in enumerate(array("i", asked.targets))]
            for asked in plan.prompt_logprobs
        ]
        pooled = [_sum_of(hashes[asked.at : asked.at + asked.count]) for asked in plan.pools]
        return StepResult(tokens, [None] * len(tokens), scores, pooled=[each.tobytes() for each in pooled])

    def _turn(self, chunk: Chunk, place: int) -> int:
        """What a token of an answer depends on beside what is before it: where that began."""
        end = chunk.context + chunk.count
        assert chunk.answers == min(chunk.count, chunk.answered)
        return end - chunk.answered if self.forgets_answers and place >= chunk.count - chunk.answers else 0

    def _slot(self, blocks: list[int], index: int) -> int:
        return blocks[index // self.block_size] * self.block_size + index % self.block_size

    def offload(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies (block, place) to the host's memory."""
        size = self.block_size
        for block, place in copies:
            self.host[place] = [self.slots[block * size + n] for n in range(size)]

    def _copy(self, plan: StepPlan) -> None:
        """To the host's memory, and back."""
        size = self.block_size
        self.offload(plan.offloaded)
        assert len({block for _, block in plan.loaded}) == len(plan.loaded)
        for place, block in plan.loaded:
            self.slots |= {block * size + n: each for n, each in enumerate(self.host[place])}

    def _rows(self, slices: list[RowSlice]) -> dict[int, int]:
        out: dict[int, int] = {}
        for piece in slices:
            first, odd = divmod(piece.offset, ROW_BYTES)
            picture, row = divmod(first, _ARENA_ROWS)
            assert not odd
            assert row + piece.count <= self.landed.get(picture, 0), "a row was read before it landed"
            out.update({piece.at + n: first + n for n in range(piece.count)})
        return out


def _extend(before: int, token: int, row: int, adapter: int, turn: int = 0) -> int:
    return hash((before, token, row, adapter, turn))


def _all_of(prompt: Sequence[tuple[int, int]]) -> int:
    """Where all tokens of a prompt see each other, each begins with this."""
    return hash(tuple(prompt))


def _beginning(order: Order, limits: SchedulerLimits) -> int:
    rows = order.rows_at()
    prompt = [(token, rows.get(index, -1)) for index, token in enumerate(order.prompt)]
    return _all_of(prompt) if limits.chunk_rule.of_prompts else 0


def _likely(value: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(float(hash((value, token)) % 1009))


def _sum_of(values: Sequence[int]) -> np.ndarray:
    """float32 [2]: the sum of what stands for hidden states."""
    return np.array([sum(value % 1009 for value in values), sum(value % 7 for value in values)], np.float32)


def _choose(value: int, draw: Draw) -> int:
    """A token that depends on everything that a real draw depends on."""
    seen = hash((value, draw.prompt, draw.output))
    words = _WORDS
    if draw.allowed_mask or draw.banned:
        allowed = int.from_bytes(draw.allowed_mask or b"\xff" * 4, "little")
        words = [word for word in _WORDS if word not in draw.banned and allowed >> word & 1]
        words = words or [PAD - 1]  # as a sampler, which gives something where nothing can be drawn
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

    def compute_ff_tokens(self) -> Sequence[int]:
        return ()

    def deep_copy(self) -> Alternating:
        return Alternating(self.last)


def alternating(_: object, output: Sequence[int] = ()) -> Future[Matcher]:
    made: Future[Matcher] = Future()
    matcher = Alternating()
    for token in output:
        matcher.consume_token(token)
    made.set_result(matcher)
    return made


def expected(order: Order, choice: int, limits: SchedulerLimits) -> tuple[list[int], str]:
    """What a choice must say, and why it ends; for greedy or seeded requests."""
    sampling, rows = order.sampling, order.rows_at()
    value = _beginning(order, limits)
    for index, token in enumerate(order.prompt):
        value = _extend(value, token, rows.get(index, -1), order.adapter)
    matcher = Alternating() if sampling.grammar else None
    ends = (() if sampling.ignore_eos else (EOS,)) + sampling.stop_token_ids
    out: list[int] = []
    while True:
        chance = 0.0 if sampling.greedy else uniform(sampling.seed or 0, choice, len(out))
        banned = ends if len(out) < sampling.min_tokens else ()
        banned += tuple(run[-1] for run in sampling.bad_word_ids if run[:-1] == tuple(out)[len(out) - len(run) + 1 :])
        prompt = array("i", sorted(set(order.prompt)) if sampling.repetition_penalty != 1.0 else []).tobytes()
        said = array("i", out if sampling.penalises else []).tobytes()
        allowed = matcher.compute_bitmask() if matcher else b""
        if sampling.allowed_mask:
            whole = int.from_bytes(allowed or b"\xff" * 4, "little") & int.from_bytes(sampling.allowed_mask, "little")
            allowed = whole.to_bytes(4, "little")
            if not any(whole >> word & 1 and word not in banned for word in range(32)):
                return out, "failed"
        draw = Draw(at=0, uniform=chance, banned=banned, prompt=prompt, output=said, allowed_mask=allowed)
        token = _choose(value, draw)
        if matcher:
            matcher.consume_token(token)
        if matcher and matcher.is_error():
            return out, "failed"
        out.append(token)
        if token in ends:
            return out, "stop"
        if matcher and matcher.is_stopped():
            return out, "structure"
        if len(out) == sampling.max_tokens or len(order.prompt) + len(out) >= limits.max_context:
            return out, "length"
        value = _extend(value, token, -1, order.adapter, len(order.prompt) if limits.forgets_answers else 0)


def expected_slots(order: Order) -> list[int]:
    """What is computed in each slot of a prompt, of which no token depends on later ones."""
    rows, value, out = order.rows_at(), 0, []
    for index, token in enumerate(order.prompt):
        value = _extend(value, token, rows.get(index, -1), order.adapter)
        out.append(value)
    return out


def expected_vector(order: Order, limits: SchedulerLimits) -> bytes:
    """What a request's pooling must make of its prompt."""
    rows, value = order.rows_at(), _beginning(order, limits)
    values = [
        value := _extend(value, token, rows.get(index, -1), order.adapter) for index, token in enumerate(order.prompt)
    ]
    match order.pooling:
        case Pooling.MEAN:
            return (_sum_of(values).astype(np.float64) / len(values)).astype(np.float32).tobytes()
        case Pooling.CLS:
            return _sum_of(values[:1]).tobytes()
        case _:
            return _sum_of(values[-1:]).tobytes()


def expected_scores(order: Order, limits: SchedulerLimits) -> list[TokenLogprobs]:
    """How likely the prompt's tokens must be, from the second on."""
    rows, value, out = order.rows_at(), _beginning(order, limits), []
    for index, token in enumerate(order.prompt):
        if index:
            out.append(_likely(value, token))
        value = _extend(value, token, rows.get(index, -1), order.adapter)
    return out
