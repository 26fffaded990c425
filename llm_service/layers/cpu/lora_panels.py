"""Slots as our kernel for CPUs reads them, each matrix in the shortest type that has its numbers without loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array, threads_used
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import lora_kernel
from llm_service.layers.cpu.panels import in_panels, widened_panels
from llm_service.layers.lora.row_tiles import RowTiles
from llm_service.layers.lora.slots import LowRank, LowRankSlots, Runs, SlotRows, lengths, pieces_of

_STORED = {torch.float32: np.float32, torch.bfloat16: np.uint32, torch.float16: np.uint16}
"""Types of the arrays, as of `PanelWeight`, in the order of the kernel's kinds."""
_KINDS = list(_STORED)


class LowRankPanels(LowRankSlots):
    """See `LowRankSlots`. What is set aside for a slot does not depend on what is loaded: pairs lie one behind the
    other from its begin on, and of memory for float32 those of 16 bits take, and have read, the first half.

    `_words` uint32 [slots, most] has them, from `_begins` int64 [slots, parts] on, in bytes: A in panels of 64 inputs,
    B in panels of 64 outputs of one part, [panels, rank of the pair, 64] both, as `PanelWeight` has them; what they
    are stored in, `_kinds` int64 [slots, parts, 2].
    """

    def __init__(self, slots: int, rank: int, inputs: int, parts: Sequence[Runs], like: Tensor) -> None:
        """`like` has the longest dtype of any matrix, at least 16 bits."""
        super().__init__(slots, parts)
        pieces = pieces_of(parts, WIDTH)
        self._inputs, self._columns = inputs, -(-inputs // WIDTH)
        most = (len(parts) * self._columns + len(pieces)) * rank * WIDTH
        self._words = like.new_zeros(slots, most).view(torch.int32).numpy().view(np.uint32)
        self._begins = np.zeros((slots, len(parts)), np.int64)
        self._kinds = np.zeros((slots, len(parts), 2), np.int64)
        self._panels = np.array(pieces, np.int64)
        self._firsts = np.searchsorted(self._panels[:, 0], np.arange(len(parts) + 1)).astype(np.int64)

    def _fill(self, slot: int, pairs: Mapping[int, LowRank]) -> None:
        begin = 0
        for part, pair in pairs.items():
            self._begins[slot, part] = begin
            self._kinds[slot, part] = [_KINDS.index(half.dtype) for half in (pair.a, pair.b)]
            first, second = self._matrices(slot, part)
            first[:] = in_panels(pair.a.T)
            second[:] = np.concatenate([in_panels(rows) for rows in pair.b.split(lengths(self._parts[part]))])
            begin += first.nbytes + second.nbytes

    def _matrices(self, slot: int, part: int) -> tuple[Array, Array]:
        """A and B of a pair, as they are stored: panels [k, rank, 64], of pairs of bfloat16 32."""
        begin, rank = int(self._begins[slot, part]), int(self.ranks[slot, part])
        outputs = int(self._firsts[part + 1] - self._firsts[part])
        found: list[Array] = []
        for kind, count in zip(self._kinds[slot, part].tolist(), (self._columns, outputs), strict=True):
            shape = count, rank, WIDTH // (1 + (kind == lora_kernel.PAIRS))
            stored = np.dtype(_STORED[_KINDS[kind]])
            end = begin + int(np.prod(shape)) * stored.itemsize
            found.append(self._words[slot].view(np.uint8)[begin:end].view(stored).reshape(shape))
            begin = end
        return found[0], found[1]

    def first(self, slot: int, part: int) -> Tensor:
        """See `LowRankSlots`."""
        wide = widened_panels(self._matrices(slot, part)[0])
        return wide.transpose(0, 1).flatten(1)[:, : self._inputs]

    def second(self, slot: int, part: int) -> Iterator[tuple[int, int, Tensor]]:
        """See `LowRankSlots`."""
        at, stored = 0, self._matrices(slot, part)[1]
        for begin, end in self._parts[part]:
            many = -(-(end - begin) // WIDTH)
            yield begin, end, widened_panels(stored[at : at + many]).transpose(0, 1).flatten(1)[:, : end - begin]
            at += many

    def add(self, x: Tensor, out: Tensor, rows: SlotRows | RowTiles) -> None:
        """See `LowRankSlots`."""
        assert isinstance(rows, SlotRows), "they are on a CPU"
        self.add_arrays(x.contiguous().numpy(), out.numpy(), rows)

    def add_arrays(self, x: np.ndarray, out: np.ndarray, rows: SlotRows) -> None:
        """See `LowRankSlots`."""
        of_slots = self._words, self._begins, self._kinds, self.ranks, self.scales
        pieces = -(-threads_used() // (len(rows.places) * len(self._parts)))
        lora_kernel.add(out, x, rows.places, rows.slots, *of_slots, self._panels, self._firsts, pieces)
