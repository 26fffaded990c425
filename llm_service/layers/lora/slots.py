"""Pairs of low-rank matrices, and slots with one pair for each part of a layer, from which steps compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.lora.row_tiles import RowTiles

Runs = list[tuple[int, int]]
"""Begins and ends of the outputs of a part, in order."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """This rank's part of A [r, inputs] and B [outputs of a part, r], whose product is multiplied by `scale`: in
    float32 between the two, since B times it would need more bits than B."""

    a: Tensor
    b: Tensor
    scale: float

    def ordered(self, order: Tensor) -> LowRank:
        """With the rows of B in another order, int64 [outputs of the part]."""
        return LowRank(self.a, self.b[order], self.scale)


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of a batch that use slots, sorted by slot, in the order of slots in memory: `places` int64 [m], and `slots`
    int64 [m], the slot of each."""

    places: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, slots: np.ndarray) -> SlotRows:
        """Of a batch with these slots, int64 [n], -1 for none.

        >>> SlotRows.of(np.array([2, -1, 0, 2])).places
        array([2, 0, 3])
        """
        order = np.argsort(slots, kind="stable")
        places = order[np.count_nonzero(slots < 0) :]
        return cls(places, slots[places])


def told_of(pairs: Sequence[LowRank | None]) -> np.ndarray:
    """The kernels' description of a slot's pairs, int32 [2, parts]: their ranks, and the bits of their scales."""
    ranks = np.array([0 if pair is None else len(pair.a) for pair in pairs], np.int32)
    scales = np.array([0.0 if pair is None else pair.scale for pair in pairs], np.float32)
    return np.stack([ranks, scales.view(np.int32)])


class LowRankSlots(ABC):
    """`ranks` int64 and `scales` float32 [slots, parts] of the slots' pairs, 0 where there is none."""

    def __init__(self, slots: int, parts: Sequence[Runs]) -> None:
        """`parts` are the outputs of each."""
        self.ranks = np.zeros((slots, len(parts)), np.int64)
        self.scales = np.zeros((slots, len(parts)), np.float32)
        self._parts = parts

    def put(self, slot: int, pairs: Sequence[LowRank | None], told: Tensor | None = None) -> None:  # noqa: ARG002
        """Fills a slot with a pair for each part; rows of B are in the order of the part's outputs. `told` is the
        result of `told_of`, if that is on the slots' device already."""
        for part, pair in enumerate(pairs):
            self.ranks[slot, part] = 0 if pair is None else len(pair.a)
            self.scales[slot, part] = 0.0 if pair is None else pair.scale
        self._fill(slot, {part: pair for part, pair in enumerate(pairs) if pair is not None})

    @abstractmethod
    def _fill(self, slot: int, pairs: Mapping[int, LowRank]) -> None:
        """Stores the matrices, by parts."""

    @abstractmethod
    def first(self, slot: int, part: int) -> Tensor:
        """A [r, inputs], to be multiplied by torch."""

    @abstractmethod
    def second(self, slot: int, part: int) -> Iterator[tuple[int, int, Tensor]]:
        """Bᵀ by the outputs of the part: begin, end, and [r, end - begin]."""

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to do
        """Has kernels compiled, if necessary."""

    def add(self, x: Tensor, out: Tensor, rows: SlotRows | RowTiles) -> None:
        """Adds to out [n, outputs] for x [n, inputs] by a kernel; on a GPU rows lie in tiles."""
        raise NotImplementedError("there is no kernel")

    def add_arrays(self, x: np.ndarray, out: np.ndarray, rows: SlotRows) -> None:
        """The same for arrays of float32 that lie together."""
        raise NotImplementedError("there is no kernel for a CPU")


class PlainSlots(LowRankSlots):
    """`a` [slots, parts, rank, inputs] and `b` [slots, rank, outputs]; numbers beyond a pair's rank are not read."""

    def __init__(self, slots: int, rank: int, inputs: int, parts: Sequence[Runs], like: Tensor) -> None:
        """The slots are of the type and on the device of `like`."""
        super().__init__(slots, parts)
        self.a = like.new_zeros(slots, len(parts), rank, inputs)
        self.b = like.new_zeros(slots, rank, max(end for runs in parts for _, end in runs))

    def _fill(self, slot: int, pairs: Mapping[int, LowRank]) -> None:
        for part, pair in pairs.items():
            rank, runs = len(pair.a), self._parts[part]
            self.a[slot, part, :rank].copy_(pair.a)
            for (begin, end), rows in zip(runs, pair.b.split(lengths(runs)), strict=True):
                self.b[slot, :rank, begin:end].copy_(rows.T)

    def first(self, slot: int, part: int) -> Tensor:
        """See `LowRankSlots`."""
        return self.a[slot, part, : self.ranks[slot, part]]

    def second(self, slot: int, part: int) -> Iterator[tuple[int, int, Tensor]]:
        """See `LowRankSlots`."""
        for begin, end in self._parts[part]:
            yield begin, end, self.b[slot, : self.ranks[slot, part], begin:end]


def lengths(runs: Runs) -> list[int]:
    """How many outputs each has."""
    return [end - begin for begin, end in runs]


def runs_of(places: Tensor) -> Runs:
    """The ranges that some places, in any order, make up.

    >>> runs_of(torch.tensor([4, 5, 0, 1, 2]))
    [(0, 3), (4, 6)]
    """
    order = places.sort().values
    cuts = [0, *(torch.where(order.diff() > 1)[0] + 1).tolist(), len(order)]
    return [(int(order[begin]), int(order[end - 1]) + 1) for begin, end in pairwise(cuts)]


def pieces_of(parts: Sequence[Runs], width: int) -> list[tuple[int, int, int]]:
    """Part, begin and end of all outputs, cut to a width at most.

    >>> pieces_of([[(0, 100)], [(100, 110)]], 64)
    [(0, 0, 64), (0, 64, 100), (1, 100, 110)]
    """
    runs = [(part, begin, end) for part, each in enumerate(parts) for begin, end in each]
    return [(part, at, min(at + width, end)) for part, begin, end in runs for at in range(begin, end, width)]
