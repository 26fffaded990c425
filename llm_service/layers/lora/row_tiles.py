"""Which rows of a batch use which adapter's slot, for kernels on a GPU: rows of one slot are sorted together into tiles
of a fixed height, so that a tile reads its adapter once (segments as in Punica's SGMV, Chen et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import ALIGNMENT, aligned

TILE = 16
"""Rows of a tile: the fewest that a GPU's matrix units take."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """`rows` int32 [n] are batch positions of n rows, sorted by slot; `tiles` int32 [t, 3] are a slot, and where its
    rows begin and end in `rows`, at most TILE of them; a slot of -1 is padding. Both are in `packed`."""

    packed: Tensor
    tokens: int

    @classmethod
    def nobody(cls, tokens: int, slots: int, device: torch.device) -> Self:
        """A batch without adapters, with room for any with so many slots."""
        return cls(torch.from_numpy(tile_numbers(np.full(tokens, -1), most_tiles(tokens, slots))).to(device), tokens)

    @property
    def rows(self) -> Tensor:
        """See above."""
        return self.packed[: self.tokens]

    @property
    def tiles(self) -> Tensor:
        """See above."""
        return self.packed[_room(self.tokens) :].view(-1, 3)

    def numbers(self, slots: np.ndarray) -> np.ndarray:
        """The content of `packed` for a batch of at most as many rows, with these slots: int [n], -1 for none."""
        padded = np.full(self.tokens, -1)
        padded[: len(slots)] = slots
        return tile_numbers(padded, len(self.tiles))


def most_tiles(tokens: int, slots: int) -> int:
    """As many as a batch may have.

    >>> most_tiles(40, 3), most_tiles(2, 8)
    (5, 2)
    """
    return tokens // TILE + min(tokens, slots)


def tile_numbers(slots: np.ndarray, room: int | None = None) -> np.ndarray:
    """int32, the content of `RowTiles.packed` for rows with these slots, int [n], -1 for none; with `room` for so many
    tiles, else for those that there are."""
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    kinds, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    found = [
        (slot, begin, min(begin + TILE, first + count))
        for slot, first, count in zip(kinds.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for begin in range(first, first + count, TILE)
    ]
    begin = _room(len(slots))
    packed = np.full(begin + 3 * (len(found) if room is None else room), -1, np.int32)
    packed[: len(order)] = order
    packed[begin : begin + 3 * len(found)] = np.array(found, np.int32).reshape(-1)
    return packed


def _room(tokens: int) -> int:
    return aligned(tokens, ALIGNMENT // 4)
