"""LoRA on a packed linear layer: y += x Aᵀ Bᵀ for the rows of those sequences that have an adapter, by slots of a fixed
rank (Hu et al. 2021; rows of several adapters in one batch as in Punica, Chen et al. 2023). Rows without one are not
touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.cpu import selection
from llm_service.layers.linear import PackedLinear

_LONG = 4
"""Rows from which on two products by torch are faster than our kernel, which reads an adapter anew for each."""

Pair = tuple[Tensor, Tensor]
"""This rank's share of A [r, inputs] and of B [outputs of a part, r], the scale in it."""


@dataclass(frozen=True, slots=True)
class AdaptedRun:
    """Rows `begin` to `end` of a batch, one after the other, go through a slot."""

    slot: int
    begin: int
    end: int


def adapted_runs(slots: np.ndarray) -> list[AdaptedRun]:
    """Rows that follow one another and have one slot, int [n], -1 for none.

    >>> adapted_runs(np.array([-1, 2, 2, 0]))
    [AdaptedRun(slot=2, begin=1, end=3), AdaptedRun(slot=0, begin=3, end=4)]
    """
    ends = [*np.flatnonzero(np.diff(slots)) + 1, len(slots)]
    parts = zip([0, *ends], ends, strict=False)
    return [AdaptedRun(int(slots[begin]), int(begin), int(end)) for begin, end in parts if slots[begin] >= 0]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a batch that adapters add to: `long` runs, whose rows share what is read of an adapter, and the slot
    of each row of the others, int64 [n], -1 for the rest; None where there are no others."""

    long: list[AdaptedRun]
    few: np.ndarray | None

    @classmethod
    def of(cls, slots: np.ndarray, least: int) -> AdaptedRows:
        """A run of `least` rows or more is a long one."""
        runs = adapted_runs(slots)
        long = [run for run in runs if run.end - run.begin >= least]
        if len(long) == len(runs):
            return cls(long, None)
        few = slots.astype(np.int64)
        for run in long:
            few[run.begin : run.end] = -1
        return cls(long, few)


@dataclass(slots=True)
class AdapterRows:
    """What all layers read of a step: which rows go through which slot. A step's last layer may compute some of the
    rows alone, which are told apart by how many they are. With `kernel` there is one for few rows, while numba's are
    selected."""

    kernel: bool = False
    _by_count: dict[int, AdaptedRows] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        """Some row has an adapter."""
        return bool(self._by_count)

    def clear(self) -> None:
        """No row of the next step has one."""
        self._by_count = {}

    def use(self, slots: np.ndarray, places: np.ndarray) -> None:
        """The slot of each row of the next step, int [n], -1 for none; `places` [m] are those that are wanted of its
        last layer, in order: all of them where m is n."""
        least = _LONG if self.kernel and selection.is_numba() else 1
        self._by_count = {len(each): AdaptedRows.of(each, least) for each in (slots[places], slots)}

    def of(self, count: int) -> AdaptedRows:
        """Those of a batch of so many rows."""
        return self._by_count[count]


class LinearAdapters:
    """The slots of one linear layer, each for one adapter: `a` [slots, parts, rank, inputs] and `b` [slots, rank,
    outputs], where an adapter of a lower rank, or of none, leaves the rest unread."""

    def __init__(self, linear: PackedLinear, slots: int, rank: int, rows: AdapterRows, like: Tensor) -> None:
        """The slots are of the type and on the device of `like`."""
        self.rows = rows
        self._linear = linear
        self.a = like.new_zeros(slots, len(linear.parts), rank, linear.inputs)
        self.b = like.new_zeros(slots, rank, linear.outputs)
        self._ranks = np.zeros((slots, len(linear.parts)), np.int64)
        self._places = [linear.places(part) for part in linear.parts]
        self._runs = [_runs(places) for places in self._places]
        table = [(number, *run) for number, runs in enumerate(self._runs) for run in runs]
        self._arrays = (self.a.numpy(), self.b.numpy()) if rows.kernel else None
        self._table = np.array(table, np.int64)

    @property
    def active(self) -> bool:
        """See `AddsToRows`."""
        return self.rows.any

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """Fills a slot with what an adapter has for the parts of this layer; those that are not there stay as the base
        has them."""
        for number, part in enumerate(self._linear.parts):
            self._ranks[slot, number] = 0
            if part in pairs:
                a, b = pairs[part]
                rank = self._ranks[slot, number] = a.shape[0]
                self.a[slot, number, :rank].copy_(a)
                self.b[slot, :rank, self._places[number].to(self.b.device)] = b.T.to(self.b)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """See `AddsToRows`."""
        rows = self.rows.of(x.shape[0])
        for run in rows.long:
            ranks = self._ranks[run.slot].tolist()
            if any(ranks):
                self._add(run, ranks, x[run.begin : run.end], out[run.begin : run.end])
        if rows.few is not None:
            assert self._arrays is not None, "there is a kernel"
            from llm_service.layers.cpu import adapter_kernel  # numba takes its time

            adapter_kernel.add(out.numpy(), x.contiguous().numpy(), *self._arrays, rows.few, self._ranks, self._table)
        return out

    def _add(self, run: AdaptedRun, ranks: Sequence[int], x: Tensor, out: Tensor) -> None:
        a, b = self.a[run.slot], self.b[run.slot]
        for number, rank in enumerate(ranks):
            if rank:
                inner = x @ a[number, :rank].T
                for begin, end in self._runs[number]:
                    out[:, begin:end].addmm_(inner, b[:rank, begin:end])


def _runs(places: Tensor) -> list[tuple[int, int]]:
    """The ranges that some places, in any order, make up.

    >>> _runs(torch.tensor([4, 5, 0, 1, 2]))
    [(0, 3), (4, 6)]
    """
    order = places.sort().values
    cuts = [0, *(torch.where(order.diff() > 1)[0] + 1).tolist(), len(order)]
    return [(int(order[begin]), int(order[end - 1]) + 1) for begin, end in pairwise(cuts)]
