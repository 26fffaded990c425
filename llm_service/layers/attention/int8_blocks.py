"""Keys and values in 8 bits with a scale for each token and head.

A block has the numbers of its tokens, [block_size, kv_heads, head_dim] int8, followed by their scales, float32
[block_size, kv_heads]. A scale is the largest magnitude of a token and head divided by 127.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

SCALE_BYTES: Final = 4
MOST: Final = 127


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [n, kv_heads, head_dim] → int8 of the same shape, and their scales, float32 [n, kv_heads].

    >>> [each.flatten().tolist() for each in quantize(torch.tensor([[[-2.0, 0.5, 1.0]]]))]
    [[-127, 32, 64], [0.015748031437397003]]
    """
    x = x.float()
    highest = x.abs().amax(2)
    inverse = torch.where(highest > 0, MOST / highest, 0.0)
    return (x * inverse.unsqueeze(2) + 0.5).floor().to(torch.int8), highest / MOST


@dataclass(frozen=True, slots=True)
class Int8Tokens:
    """The keys of one layer, or its values, by slot: `part` is int8 [blocks + 1, bytes of a block]."""

    part: Tensor
    block_size: int
    kv_heads: int
    head_dim: int

    @property
    def _numbers(self) -> Tensor:
        numbers = self.part[:, : self.block_size * self.kv_heads * self.head_dim]
        return numbers.view(-1, self.block_size, self.kv_heads, self.head_dim)

    @property
    def _scales(self) -> Tensor:
        scales = self.part[:, self.block_size * self.kv_heads * self.head_dim :].view(torch.float32)
        return scales.view(-1, self.block_size, self.kv_heads)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Keeps tokens [n, kv_heads, head_dim] in these slots, int64 [n]."""
        block, place = slots // self.block_size, slots % self.block_size
        self._numbers[block, place], self._scales[block, place] = quantize(x)

    def __getitem__(self, slots: slice | Tensor) -> Tensor:
        """The content of these slots, float32 [n, kv_heads, head_dim]."""
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=self.part.device)
        block, place = slots // self.block_size, slots % self.block_size
        return self._numbers[block, place].float() * self._scales[block, place].unsqueeze(2)
