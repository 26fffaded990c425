"""LoRA on a packed linear layer: y += x Aᵀ Bᵀ for the rows of those sequences that have an adapter, by slots of a fixed
rank (Hu et al. 2021; rows of several adapters in one batch as in Punica, Chen et al. 2023). Rows without one are not
touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.adapter_tiles import RowTiles, tile_numbers
from llm_service.layers.cpu import selection
from llm_service.layers.linear import PackedLinear


class AdapterKernel(Enum):
    """What adds to rows next to which others have another adapter; the value is the number of rows of one adapter from
    which on torch's products are faster. NONE: torch's alone."""

    NONE = 1
    CPU = 4  # reads an adapter anew for each row
    GPU = 256  # reads it anew for each tile


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
    of each row of the others, int64 [n], -1 for the rest; None where there are no others. `tiles` are the others on a
    GPU."""

    long: list[AdaptedRun]
    few: np.ndarray | None
    tiles: RowTiles | None = None

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
    rows alone, which are told apart by how many they are. The `kernel` for CPUs counts while numba's are selected."""

    kernel: AdapterKernel = AdapterKernel.NONE
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
        last layer, in order: all of them where m is n. For a GPU, `put` follows."""
        kernel = self.kernel
        if kernel is AdapterKernel.CPU and not selection.is_numba():
            kernel = AdapterKernel.NONE
        self._by_count = {len(each): AdaptedRows.of(each, kernel.value) for each in (slots[places], slots)}

    def numbers(self) -> list[np.ndarray]:
        """What a GPU's kernels read of the next step: to be moved there, and given to `put`."""
        if self.kernel is not AdapterKernel.GPU:
            return []
        return [tile_numbers(rows.few) for rows in self._by_count.values() if rows.few is not None]

    def put(self, numbers: Sequence[Tensor]) -> None:
        """`numbers`, on the device."""
        given = iter(numbers)
        for count, rows in self._by_count.items():
            if rows.few is not None and self.kernel is AdapterKernel.GPU:
                self._by_count[count] = AdaptedRows(rows.long, rows.few, RowTiles(next(given), count))

    @contextmanager
    def over(self, tiles: RowTiles | None) -> Iterator[None]:
        """Meanwhile layers compute a batch of these tiles, whatever they hold by then; without tiles one without
        adapters."""
        before = self._by_count
        self._by_count = {} if tiles is None else {tiles.tokens: AdaptedRows([], None, tiles)}
        try:
            yield
        finally:
            self._by_count = before

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
        table = [(number, begin, end) for number, runs in enumerate(self._runs) for begin, end in runs]
        self._arrays = (self.a.numpy(), self.b.numpy()) if rows.kernel is AdapterKernel.CPU else None
        self._table = np.array(table, np.int64)
        if rows.kernel is AdapterKernel.GPU:
            from llm_service.layers.gpu.adapter_kernels import output_blocks  # Triton is not everywhere

            self._there = torch.zeros(slots, len(linear.parts), dtype=torch.int32, device=like.device)
            self._blocks = torch.tensor(output_blocks(table), dtype=torch.int32, device=like.device)

    def warm_up(self) -> None:
        """Has a GPU's kernels compiled, where they are not, over a row without an adapter."""
        if self.rows.kernel is AdapterKernel.GPU:
            x = self.a.new_zeros(1, self._linear.inputs)
            with self.rows.over(RowTiles.nobody(1, len(self.a), x.device)):
                self.add(x, x.new_zeros(1, self._linear.outputs))

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
        if self.rows.kernel is AdapterKernel.GPU:
            self._there[slot].copy_(torch.from_numpy(self._ranks[slot]))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """See `AddsToRows`."""
        rows = self.rows.of(x.shape[0])
        for run in rows.long:
            ranks = self._ranks[run.slot].tolist()
            if any(ranks):
                self._add(run, ranks, x[run.begin : run.end], out[run.begin : run.end])
        if rows.tiles is not None:
            from llm_service.layers.gpu import adapter_kernels  # Triton is not everywhere

            adapter_kernels.add(out, x, self.a, self.b, self._there, self._blocks, rows.tiles)
        elif rows.few is not None:
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
