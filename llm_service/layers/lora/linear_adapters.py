"""LoRA on a packed linear layer: y += x Aᵀ Bᵀ for the rows of sequences with an adapter, by slots of a fixed rank (Hu
et al. 2021; rows of several adapters in one batch as in Punica, Chen et al. 2023). Rows without one are not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.cpu import selection
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.lora.row_tiles import RowTiles, tile_numbers
from llm_service.layers.lora.slots import LowRank, LowRankSlots, PlainSlots, Runs, SlotRows, runs_of


class AdapterKernel(Enum):
    """The kernel for rows next to rows with other adapters; the value is the number of rows of one adapter from which
    on torch's products are faster. NONE: torch only."""

    NONE = 1
    CPU = 32  # reads an adapter for each row, from cache if the row before has it
    GPU = 256  # reads it for each tile


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
    """The rows of a batch with adapters: `long` runs, whose rows share what is read of an adapter, and the slot of each
    other row, int64 [n], -1 for none; None if there are no others. `by_slots` and, on a GPU, `tiles` are the others in
    the kernels' form."""

    long: list[AdaptedRun]
    few: np.ndarray | None
    by_slots: SlotRows | None = None
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
        return cls(long, few, SlotRows.of(few))


@dataclass(slots=True)
class AdapterRows:
    """What all layers read of a step: which rows use which slot. A step's last layer may compute only some of the rows,
    which are recognised by their number. The `kernel` for CPUs applies while numba's kernels are selected."""

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
        """The slot of each row of the next step, int [n], -1 for none; `places` [m] are the rows of its last layer, in
        order: all rows if m is n. On a GPU, `put` follows."""
        kernel = self.kernel
        if kernel is AdapterKernel.CPU and not selection.is_numba():
            kernel = AdapterKernel.NONE
        self._by_count = {len(each): AdaptedRows.of(each, kernel.value) for each in (slots[places], slots)}

    def numbers(self) -> list[np.ndarray]:
        """What a GPU's kernels read of the next step: to be moved there, and passed to `put`."""
        if self.kernel is not AdapterKernel.GPU:
            return []
        return [tile_numbers(rows.few) for rows in self._by_count.values() if rows.few is not None]

    def put(self, numbers: Sequence[Tensor]) -> None:
        """`numbers`, on the device."""
        given = iter(numbers)
        for count, rows in self._by_count.items():
            if rows.few is not None and self.kernel is AdapterKernel.GPU:
                self._by_count[count] = replace(rows, tiles=RowTiles(next(given), count))

    @contextmanager
    def over(self, tiles: RowTiles | None) -> Iterator[None]:
        """In this context layers compute a batch of these tiles, whatever they contain by then; without tiles, a batch
        without adapters."""
        before = self._by_count
        self._by_count = {} if tiles is None else {tiles.tokens: AdaptedRows([], None, tiles=tiles)}
        try:
            yield
        finally:
            self._by_count = before

    def of(self, count: int) -> AdaptedRows:
        """The rows of a batch of so many rows."""
        return self._by_count[count]


class LinearAdapters:
    """The slots of one linear layer, each for one adapter."""

    def __init__(self, linear: PackedLinear, slots: int, rank: int, rows: AdapterRows, like: Tensor) -> None:
        """The slots are on the device of `like`, and of its type, or for numbers of its length."""
        self.rows = rows
        self._linear = linear
        places = [linear.places(part) for part in linear.parts]
        self._orders = [each.argsort() for each in places]
        parts = [runs_of(each) for each in places]
        self._slots = _slots_for(rows.kernel)(slots, rank, linear.inputs, parts, like)

    def warm_up(self) -> None:
        """Has a GPU's kernels compiled, if necessary."""
        self._slots.warm_up()

    @property
    def active(self) -> bool:
        """See `AddsToRows`."""
        return self.rows.any

    def put(self, slot: int, pairs: Mapping[str, LowRank]) -> None:
        """Fills a slot with an adapter's pairs for the parts of this layer; missing parts stay unchanged."""
        self._slots.put(slot, self.ordered(pairs))

    def ordered(self, pairs: Mapping[str, LowRank]) -> list[LowRank | None]:
        """The pair of each part, as `put_ordered` takes it."""
        own = (pairs.get(part) for part in self._linear.parts)
        return [pair and pair.ordered(order) for pair, order in zip(own, self._orders, strict=True)]

    def put_ordered(self, slot: int, pairs: Sequence[LowRank | None], told: Tensor) -> None:
        """As `put`, if everything is on the device: nothing waits. `told` is the result of `told_of`."""
        self._slots.put(slot, pairs, told)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """See `AddsToRows`."""
        rows = self.rows.of(x.shape[0])
        for run in rows.long:
            self._add(run.slot, x[run.begin : run.end], out[run.begin : run.end])
        few = rows.by_slots if rows.tiles is None else rows.tiles
        if few is not None:
            self._slots.add(x, out, few)
        return out

    def add_arrays(self, x: np.ndarray, out: np.ndarray) -> None:
        """See `AddsToRows`."""
        rows = self.rows.of(len(x))
        if rows.by_slots is not None and rows.tiles is None and not rows.long:
            self._slots.add_arrays(x, out, rows.by_slots)
        else:
            self.add(torch.from_numpy(x), torch.from_numpy(out))

    def _add(self, slot: int, x: Tensor, out: Tensor) -> None:
        for part in np.flatnonzero(self._slots.ranks[slot]).tolist():
            inner = (x @ self._slots.first(slot, part).T).mul_(float(self._slots.scales[slot, part]))
            for begin, end, second in self._slots.second(slot, part):
                out[:, begin:end].addmm_(inner, second)


def _slots_for(kernel: AdapterKernel) -> Callable[[int, int, int, Sequence[Runs], Tensor], LowRankSlots]:
    if kernel is AdapterKernel.GPU:
        from llm_service.layers.gpu.lora_tiles import LowRankTiles  # Triton is not everywhere

        return LowRankTiles
    if kernel is AdapterKernel.CPU:
        from llm_service.layers.cpu.lora_panels import LowRankPanels  # numba takes its time

        return LowRankPanels
    return PlainSlots
