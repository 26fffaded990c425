"""A sequence: one choice of one request, as the scheduler sees it. Numbers only, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np

from llm_service.engine.block_manager import BlockTable, block_identity, root_identity
from llm_service.engine.messages import NOWHERE, Add
from llm_service.engine.structure import Matcher
from llm_service.request import Sampling

Order = tuple[int, int, int]

UNKNOWN = 0
"""Stands in the place of a token that a step under way will choose."""


@dataclass(slots=True)
class Item:
    """An item of a prompt; all choices of a request share it. `landed` rows, from the first on, are in the arena."""

    key: bytes
    offset: int
    runs: list[tuple[int, int, int]]
    landed: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens so far, how many of them have their KV computed, and the blocks that hold it.

    A step counts as computed when it is planned, since steps run in the order in which they were planned. So the last
    `unknown` tokens may still be to come from steps under way; the last of them is draw number `drawn` of its step.

    `positions` is int32 [3, prompt tokens]; a token at index i past the prompt is at i + delta in all three. `order`
    ranks sequences: a smaller one is served first. `max_length` is how long it may grow, `stop_ids` are the
    tokens that end it.
    `after` is the choice that computes the shared prompt. `starved`: nothing can be computed until rows land,
    `asking`: until its items have places. The prompt's tokens before `scored` have been scored by steps up to the last
    one planned, or need no score. `media_end` is one past the last place of a media row; `plain`: the likeliest token
    is drawn, and nothing else asked; `penalised`: the prompt's distinct tokens, int32, where repeating them is
    penalised; `runs` of media rows in order: first place, the one past the last, first row, the item's key."""

    id: int
    choice: int
    prompt_tokens: int
    tokens: array[int]
    positions: np.ndarray
    delta: int
    items: list[Item]
    sampling: Sampling
    seed: int
    root: bytes
    session: int
    order: Order
    max_length: int
    stop_ids: tuple[int, ...]
    forming: Future[Matcher] | None = None
    matcher: Matcher | None = None
    after: Sequence | None = None
    computed: int = 0
    unknown: int = 0
    drawn: int = 0
    running: bool = False
    started: bool = False
    starved: bool = False
    asking: bool = False
    scored: int = 0
    over: bool = False
    table: BlockTable = field(default_factory=BlockTable)
    media_end: int = 0
    plain: bool = False
    penalised: bytes = b""
    runs: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    _chain: list[bytes] = field(default_factory=list)
    _passed_runs: int = 0

    @classmethod
    def of(cls, add: Add, *, arrival: int, seed: int, max_length: int, eos: tuple[int, ...]) -> list[Sequence]:
        """One sequence for each choice of a request; all but the first wait until the first has its prompt computed."""
        prompt = array("i", add.token_ids)
        positions = np.frombuffer(add.positions, np.int32).reshape(3, len(prompt))
        items = [Item(item.key, item.offset, item.runs, item.landed) for item in add.items]
        sampling = add.sampling
        penalised = b"" if sampling.repetition_penalty == 1.0 else np.unique(prompt).tobytes()
        runs = sorted((at, at + count, row, item.key) for item in items for at, row, count in item.runs)
        sequences: list[Sequence] = []
        for choice in range(sampling.n):
            sequence = cls(
                id=add.id,
                choice=choice,
                prompt_tokens=len(prompt),
                tokens=array("i", prompt),
                positions=positions,
                delta=add.delta,
                items=items,
                sampling=sampling,
                root=root_identity(add.salt),
                session=add.session,
                seed=seed if sampling.seed is None else sampling.seed,
                order=(-add.priority, arrival, choice),
                max_length=min(max_length, len(prompt) + sampling.max_tokens),
                stop_ids=(*(() if sampling.ignore_eos else eos), *sampling.stop_token_ids),
                after=sequences[0] if sequences else None,
                scored=len(prompt) if choice or sampling.prompt_logprobs is None else 1,
                plain=sampling == _plainest(sampling),
                penalised=penalised,
                media_end=max((end for _, end, _, _ in runs), default=0),
                runs=runs,
            )
            sequences.append(sequence)
        return sequences

    @property
    def generated(self) -> int:
        """Tokens chosen so far, those of steps under way included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def known(self) -> int:
        """Tokens, from the first on, that are known by now."""
        return len(self.tokens) - self.unknown

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def full(self) -> bool:
        """No token may be added: once the steps under way are done, it ends."""
        return len(self.tokens) >= self.max_length

    @property
    def blocked(self) -> bool:
        """Another choice is still computing the shared prompt."""
        return self.after is not None and self.after.generated == 0

    @property
    def held(self) -> bool:
        """What may come next depends on a token that is not known yet."""
        return self.matcher is not None and self.unknown > 0

    def lacks_rows(self, begin: int) -> bool:
        """Whether an item has no place in the arena though some of its rows stand at `begin` or after it."""
        return any(
            item.offset == NOWHERE and any(start + count > begin for start, _, count in item.runs)
            for item in self.items
        )

    def formed(self) -> bool:
        """Its matcher is there, if it needs one."""
        if self.forming is not None and self.forming.done():
            self.matcher, self.forming = self.forming.result(), None
        return self.forming is None

    def ready(self, begin: int) -> int:
        """How many tokens from `begin` on can be computed now: those before the first media row that has not landed.

        >>> # 4 tokens of text, then a picture of 6 rows of which 2 have landed: from 0 on, 6 tokens can be computed.
        """
        limit = len(self.tokens)
        if begin >= self.media_end:
            return limit - begin
        for item in self.items:
            for start, first_row, count in item.runs:
                if start + count > begin and item.landed < first_row + count:
                    limit = min(limit, start + max(0, item.landed - first_row))
        return max(0, limit - begin)

    def whole(self, begin: int, count: int, longest: int) -> int:
        """`count`, or fewer, so that a chunk from `begin` on does not end inside a media run, unless what is left of
        the run is longer than `longest`.

        With a run at 4 … 9, a chunk of 8 tokens from 0 on becomes one of 4.
        """
        end = begin + count
        for item in self.items:
            for start, _, length in item.runs:
                first = max(start, begin)
                if start < end < start + length and start + length - first <= longest:
                    return first - begin
        return count

    def planned(self, count: int, drawn: int) -> None:
        """A step computes the next `count` tokens and, unless `drawn` is -1, chooses a token as that draw."""
        self.computed += count
        if drawn >= 0:
            self.tokens.append(UNKNOWN)
            self.unknown += 1
            self.drawn = drawn

    def learn(self, token: int) -> None:
        """The first token that was not known is this one."""
        self.tokens[-self.unknown] = token
        self.unknown -= 1

    def identity(self, index: int, block_size: int) -> bytes:
        """The identity of block number `index` of the sequence, all of whose tokens must be known."""
        if not self._chain and self.after is not None:  # which has the same prompt, and has computed it
            self._chain = self.after._chain[: self.prompt_tokens // block_size]
        while len(self._chain) <= index:
            number = len(self._chain)
            begin, end = number * block_size, (number + 1) * block_size
            parent = self._chain[-1] if number else self.root
            media = [(key, row + max(0, begin - start)) for start, _, row, key in self._runs_within(begin, end)]
            self._chain.append(block_identity(parent, self.tokens[begin:end].tobytes(), media))
        return self._chain[index]

    def _runs_within(self, begin: int, end: int) -> Iterator[tuple[int, int, int, bytes]]:
        """The runs that have a place from `begin` to the one before `end`; asked for in order."""
        while self._passed_runs < len(self.runs) and self.runs[self._passed_runs][1] <= begin:
            self._passed_runs += 1
        return takewhile(lambda run: run[0] < end, islice(self.runs, self._passed_runs, None))

    def identities(self, block_size: int) -> list[bytes]:
        """The identities of the blocks that need not be computed where they are cached: all full ones, up to the first
        token of which it is asked what comes after it. At the latest that is the last one."""
        asked = len(self.tokens) if self.scored >= self.prompt_tokens else self.scored
        count = (asked - 1) // block_size
        if count:
            self.identity(count - 1, block_size)
        return self._chain[:count]


def _plainest(sampling: Sampling) -> Sampling:
    """As long, and nothing but the likeliest token."""
    kept = {name: getattr(sampling, name) for name in ("max_tokens", "n", "ignore_eos", "stop_token_ids", "seed")}
    return Sampling(temperature=0.0, **kept)
