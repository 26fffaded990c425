"""Slots as our kernel for CPUs reads them, each in the shortest type that has its adapter's numbers without loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array
from llm_service.layers.adapter_tiles import RowTiles
from llm_service.layers.cpu import adapter_kernel
from llm_service.layers.cpu.panel_kernel import WIDTH
from llm_service.layers.cpu.panels import in_panels, widened_panels
from llm_service.layers.low_rank import LowRank, LowRankSlots, Runs, lengths, pieces_of

_STORED = {torch.float32: np.float32, torch.bfloat16: np.uint32, torch.float16: np.uint16}
"""Types of the arrays, as of `PanelWeight`, in the order of the kernel's kinds."""
_KINDS = list(_STORED)


class LowRankPanels(LowRankSlots):
    """See `LowRankSlots`. Each slot has memory for float32, of which an adapter of 16 bits takes the first half: what
    is set aside does not depend on what is loaded, and half of it is read.

    `_a` uint32 [slots, words] has A [parts, rank, inputs] of each slot: float32, float16, or pairs of bfloat16, in word
    i of inputs / 2 input i, in its lower half, and i + inputs / 2. `_b` has B in panels of 64 outputs of
    one part: [panels, rank, 64], as `PanelWeight`.
    """

    def __init__(self, slots: int, rank: int, inputs: int, parts: Sequence[Runs], like: Tensor) -> None:
        """The slots are of the type of `like`, which is float32."""
        super().__init__(slots, parts)
        pieces = pieces_of(parts, WIDTH)
        self._shape = len(parts), rank, inputs
        self._a = like.new_zeros(slots, len(parts) * rank * inputs).numpy().view(np.uint32)
        self._b = like.new_zeros(slots, len(pieces) * rank * WIDTH).numpy().view(np.uint32)
        self._kinds = np.zeros(slots, np.int64)
        self._panels = np.array(pieces, np.int64)

    def _fill(self, slot: int, pairs: Mapping[int, LowRank]) -> None:
        kinds = {half.dtype for pair in pairs.values() for half in (pair.a, pair.b)}
        kind = kinds.pop() if len(kinds) == 1 else torch.float32
        if kind == torch.bfloat16 and self._shape[-1] % 2:
            kind = torch.float32
        self._kinds[slot] = _KINDS.index(kind)
        first, second = self._first(slot), self._second(slot)
        for part, pair in pairs.items():
            rank, rows = len(pair.a), pair.b.to(kind).split(lengths(self._parts[part]))
            first[part, :rank] = _stored(pair.a.to(kind))
            for panels, each in zip(self._panels_of(part), rows, strict=True):
                second[panels, :rank] = in_panels(each)

    def _panels_of(self, part: int) -> Iterator[slice]:
        """The panels of each run of a part's outputs."""
        begin = int(np.argmax(self._panels[:, 0] == part))
        for count in lengths(self._parts[part]):
            begin, before = begin + -(-count // WIDTH), begin
            yield slice(before, begin)

    def _first(self, slot: int) -> Array:
        """A as it is stored: [parts, rank, inputs]; of pairs half as many."""
        parts, rank, inputs = self._shape
        return self._matrices(self._a[slot], self._kinds[slot], (parts, rank, inputs))

    def _second(self, slot: int) -> Array:
        """B as it is stored: panels [k, rank, 64]; of pairs 32."""
        return self._matrices(self._b[slot], self._kinds[slot], (len(self._panels), self._shape[1], WIDTH))

    @staticmethod
    def _matrices(words: Array, kind: int, shape: tuple[int, int, int]) -> Array:
        many, rank, width = shape
        width //= 1 + (kind == adapter_kernel.PAIRS)
        found: Array = words.view(_STORED[_KINDS[kind]])[: many * rank * width].reshape(many, rank, width)
        return found

    def first(self, slot: int, part: int) -> Tensor:
        """See `LowRankSlots`."""
        found = self._first(slot)[part, : self.ranks[slot, part]]
        if found.dtype == np.uint32:
            pairs = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).float()
            return torch.cat([pairs[:, ::2], pairs[:, 1::2]], dim=1)
        return torch.from_numpy(found.view(np.float16) if found.dtype == np.uint16 else found).float()

    def second(self, slot: int, part: int) -> Iterator[tuple[int, int, Tensor]]:
        """See `LowRankSlots`."""
        stored, rank = self._second(slot), self.ranks[slot, part]
        for (begin, end), panels in zip(self._parts[part], self._panels_of(part), strict=True):
            wide = widened_panels(np.ascontiguousarray(stored[panels, :rank]))
            yield begin, end, wide.transpose(0, 1).flatten(1)[:, : end - begin]

    def add(self, x: Tensor, out: Tensor, rows: np.ndarray | RowTiles) -> None:
        """See `LowRankSlots`."""
        assert isinstance(rows, np.ndarray), "they are on a CPU"
        self.add_arrays(x.contiguous().numpy(), out.numpy(), rows)

    def add_arrays(self, x: np.ndarray, out: np.ndarray, rows: np.ndarray) -> None:
        """See `LowRankSlots`."""
        adapter_kernel.add(
            out, x, self._shape[1], self._a, self._b, rows, self._kinds, self.ranks, self.scales, self._panels
        )


def _stored(a: Tensor) -> Array:
    """A [r, inputs] as it is stored."""
    if a.dtype == torch.bfloat16:
        pairs = torch.stack(a.chunk(2, dim=1), dim=-1)
        words: Array = pairs.view(torch.int16).numpy().view(np.uint32)[:, :, 0]
        return words
    numbers: Array = a.contiguous().numpy()
    return numbers.view(np.uint16) if a.dtype == torch.float16 else numbers
