"""Adapter slots on a GPU, computed by our Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.gpu import lora_kernels
from llm_service.layers.gpu.kernel_trial import gives
from llm_service.layers.lora.row_tiles import RowTiles, tile_numbers
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


_INPUTS, _OUTPUTS = 1200, ([(0, 96)], [(96, 128)])
"""Of a trial: inputs of several programs, and the outputs of two parts."""
_APART = 0.02
"""How far what adapters add may be from torch's products, by its length: it is rounded between them."""


@cache
@torch.inference_mode()
def computes(rank: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our kernels add what torch's products do, for slots of a rank: a compiler may make wrong code of them.
    Tried once, with rows of two adapters and one row of none."""
    slots, like = np.repeat([0, -1, 1], [21, 1, 10]), torch.empty(0, dtype=dtype, device=device)
    own, x = LowRankTiles(2, rank, _INPUTS, _OUTPUTS, like), _noise(like, len(slots), _INPUTS)
    expected = torch.zeros(len(slots), _OUTPUTS[-1][-1][1], device=device)
    for slot, ranks in ((0, (rank, rank)), (1, (max(1, rank // 2), 0))):
        here, pairs = torch.from_numpy(slots == slot).to(device), list[LowRank | None]()
        for number, ((begin, end),) in zip(ranks, _OUTPUTS, strict=True):
            a, b = _noise(like, number, _INPUTS) / _INPUTS**0.5, _noise(like, end - begin, number)
            pairs.append(LowRank(a, b, 0.5 + slot) if number else None)
            expected[here, begin:end] = (0.5 + slot) * (x[here].float() @ a.float().T @ b.float().T)
        own.put(slot, pairs)
    rows = RowTiles(torch.from_numpy(tile_numbers(slots)).to(device), len(slots))

    def added() -> Tensor:
        own.add(x, out := torch.zeros_like(expected, dtype=dtype), rows)
        return out

    return gives("what adapters add", added, expected, _APART)


def _noise(like: Tensor, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=like.device).to(like.dtype)
