"""Adapter slots on a GPU, computed by our Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_service.layers.gpu import lora_kernels
from llm_service.layers.lora.row_tiles import RowTiles
from llm_service.layers.lora.slots import LowRank, PlainSlots, Runs, SlotRows, pieces_of, told_of


class LowRankTiles(PlainSlots):
    """See `PlainSlots`; ranks and scales are on the GPU as well."""

    def __init__(self, slots: int, rank: int, inputs: int, parts: Sequence[Runs], like: Tensor) -> None:
        super().__init__(slots, rank, inputs, parts, like)
        pieces = pieces_of(parts, lora_kernels.OUTPUTS)
        self._ranks = torch.zeros(slots, len(parts), dtype=torch.int32, device=like.device)
        self._scales = torch.zeros(slots, len(parts), device=like.device)
        self._blocks = torch.tensor(pieces, dtype=torch.int32, device=like.device)

    def put(self, slot: int, pairs: Sequence[LowRank | None], told: Tensor | None = None) -> None:
        """See `LowRankSlots`."""
        super().put(slot, pairs)
        ranks, scales = torch.from_numpy(told_of(pairs)) if told is None else told
        self._ranks[slot].copy_(ranks)
        self._scales[slot].copy_(scales.view(torch.float32))

    def warm_up(self) -> None:
        """Over a row without an adapter."""
        nobody = RowTiles.nobody(1, len(self.a), self.a.device)
        self.add(self.a.new_zeros(1, self.a.shape[3]), self.b.new_zeros(1, self.b.shape[2]), nobody)

    def add(self, x: Tensor, out: Tensor, rows: SlotRows | RowTiles) -> None:
        """See `LowRankSlots`."""
        assert isinstance(rows, RowTiles), "they are on a GPU"
        lora_kernels.add(out, x, (self.a, self.b), (self._ranks, self._scales), self._blocks, rows)
