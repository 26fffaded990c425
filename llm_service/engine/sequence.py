"""A sequence: one choice of one request, as the scheduler sees it. Numbers only, no torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from llm_service.engine.blocks import BlockTable, block_identity, root_identity
from llm_service.engine.messages import Add
from llm_service.engine.structure import Matcher
from llm_service.plan import Draw, RowSlice
from llm_service.request import Sampling


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

    `positions` is int32 [3, prompt tokens]; a token at index i past the prompt is at i + delta in all three.
    `rank` orders sequences: a smaller one is served first. `after` is the choice that computes the shared prompt.
    """

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
    rank: tuple[int, int]
    deadline: float | None
    matcher: Matcher | None = None
    after: Sequence | None = None
    computed: int = 0
    started: bool = False
    table: BlockTable = field(default_factory=BlockTable)
    _chain: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, add: Add, *, arrival: int, seed: int) -> list[Sequence]:
        """One sequence for each choice of a request; all but the first wait until the first has its prompt computed."""
        prompt = array("i", add.token_ids)
        positions = np.frombuffer(add.positions, np.int32).reshape(3, len(prompt))
        items = [Item(item.key, item.offset, item.runs, item.landed) for item in add.items]
        sequences: list[Sequence] = []
        for choice in range(add.sampling.n):
            sequence = cls(
                id=add.id,
                choice=choice,
                prompt_tokens=len(prompt),
                tokens=array("i", prompt),
                positions=positions,
                delta=add.delta,
                items=items,
                sampling=add.sampling,
                root=root_identity(add.salt),
                seed=seed if add.sampling.seed is None else add.sampling.seed,
                rank=(-add.priority, arrival),
                deadline=add.deadline,
                after=sequences[0] if sequences else None,
            )
            sequences.append(sequence)
        return sequences

    @property
    def generated(self) -> int:
        """Tokens chosen so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def blocked(self) -> bool:
        """Another choice is still computing the shared prompt."""
        return self.after is not None and self.after.generated == 0

    def ready(self) -> int:
        """How many pending tokens can be computed now: those before the first media row that has not landed.

        >>> # 4 tokens of text, then a picture of 6 rows of which 2 have landed: 6 tokens can be computed.
        """
        limit = len(self.tokens)
        for item in self.items:
            for start, first_row, count in item.runs:
                if start + count > self.computed and item.landed < first_row + count:
                    limit = min(limit, start + max(0, item.landed - first_row))
        return max(0, limit - self.computed)

    def identities(self, blocks: int, block_size: int) -> list[bytes]:
        """The identities of the first `blocks` blocks, all of which must be full of tokens."""
        while len(self._chain) < blocks:
            index = len(self._chain)
            begin, end = index * block_size, (index + 1) * block_size
            parent = self._chain[-1] if index else self.root
            media = [
                (item.key, first_row + max(0, begin - start))
                for item in self.items
                for start, first_row, count in item.runs
                if start < end and start + count > begin
            ]
            self._chain.append(block_identity(parent, self.tokens[begin:end].tobytes(), media))
        return self._chain[:blocks]

    def window_positions(self, count: int) -> np.ndarray:
        """int32 [3, count]: the positions of the next `count` pending tokens."""
        begin, end = self.computed, self.computed + count
        if end <= self.prompt_tokens:
            return self.positions[:, begin:end]
        past = np.arange(max(begin, self.prompt_tokens), end, dtype=np.int32) + np.int32(self.delta)
        tail = np.broadcast_to(past, (3, len(past)))
        return np.concatenate([self.positions[:, begin:], tail], axis=1)

    def window_rows(self, count: int, at: int, row_bytes: int) -> Iterator[RowSlice]:
        """The media rows that the next `count` pending tokens stand for, when they begin at place `at` of the batch.

        With 10 tokens computed and a run of rows 0–7 at positions 8–15, a window of 4 takes rows 2–5 at places 0–3.
        """
        begin, end = self.computed, self.computed + count
        for item in self.items:
            for start, first_row, length in item.runs:
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    row = first_row + low - start
                    yield RowSlice(at + low - begin, item.offset + row * row_bytes, high - low)

    def draw(self, at: int, banned: tuple[int, ...]) -> Draw:
        """How the next token is to be chosen from the logits at place `at`."""
        sampling = self.sampling
        return Draw(
            at=at,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            uniform=0.0 if sampling.greedy else uniform(self.seed, self.choice, self.generated),
            banned=banned if self.generated < sampling.min_tokens else (),
            logit_bias=sampling.logit_bias,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            history=self.tokens.tobytes() if sampling.needs_history else b"",
            output_from=self.prompt_tokens,
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            allowed=b"" if self.matcher is None else self.matcher.compute_bitmask(),
        )


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: 53 bits of their SHA-256."""
    digest = hashlib.sha256(b"%d/%d/%d" % (seed, choice, index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
