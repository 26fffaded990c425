"""A block of a vision transformer with weights in panels, computed by two kernels (`block_kernel`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.cpu.arrays import lined
from common.cpu.jit import Array
from common.cpu.linear import Linear
from common.cpu.vectors.powers import GELU_BEND, GELU_SLOPE
from common.cpu.vectors.tiles import BLOCK
from common.cpu.weight_panels import WIDTH, panels_of_pairs, product_by_torch
from common.process.malloc import give_back
from encoder_service.models import block_kernel
from encoder_service.models.block_kernel import Norm, Opening, Weight, as_shorts

GELU = GELU_SLOPE, GELU_BEND
"""`Opening`'s parameters for gelu by tanh."""
KERNELS = block_kernel.KERNELS
"""See `short_rows`."""


@dataclass(frozen=True, slots=True)
class TilePanels:
    """A weight [outputs, inputs] in panels of pairs for tiles, as the kernels read it. Other products with it are
    torch's, by way of this form only."""

    outputs: int
    panels: Array

    @property
    def nbytes(self) -> int:
        """See `LaidOut`."""
        return int(self.panels.nbytes)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows, wide = x.reshape(-1, x.shape[-1]).float(), None if bias is None else bias.float()
        out = product_by_torch(rows, self.panels, wide, self.outputs)
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)


class FusedBlock:
    """The parts of a block before and after its attention, one kernel each. It lays out the weights of the block's
    layers one by one, and drops the originals."""

    def __init__(
        self,
        attention: tuple[Linear, Linear],
        feed_forward: tuple[Sequence[Linear], Linear],
        norms: Sequence[tuple[Tensor, Tensor | None, float]],
        opens: tuple[float, float],
        heads: int,
    ) -> None:
        """`attention` are the layers of queries, keys and values together, and of the projection; `feed_forward` are
        those before the activation (gates and values, if there are two), and the last; `norms` have weight, bias and
        eps; `opens` are slope and bend of `Opening`."""
        opening, closing = feed_forward
        qkv, proj = attention
        self._heads = 3 * heads
        self._dim = qkv.outputs // self._heads
        self._qkv, self._proj, self._closing = (_laid_out([linear]) for linear in (qkv, proj, closing))
        self._opening = _laid_out(opening)
        self._norm, self._next_norm = (_norm(*norm) for norm in norms)
        self._opened = Opening(len(opening) > 1, *opens)
        give_back()

    def before(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [n, width] → queries and keys, rotated, and values, [n, heads, head_dim] each."""
        tables = cosine, sine
        heads = block_kernel.before(x, self._norm, self._qkv, tables, self._heads, self._dim)
        query, key, value = heads.chunk(3, dim=1)
        return query, key, value

    def behind(self, mixed: Tensor, x: Tensor) -> Tensor:
        """The output of attention [n, heads, head_dim] and the block's input → the next hidden states."""
        weights = self._proj, self._opening, self._closing
        return block_kernel.behind(mixed.flatten(1), x, weights, self._next_norm, self._opened)


def _norm(weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    return Norm(as_shorts(weight), as_shorts(weight.new_empty(0) if bias is None else bias), eps)


def _laid_out(linears: Sequence[Linear]) -> Weight:
    """The weights of some layers, one after the other, each beginning with a panel."""
    counts = [-(-linear.outputs // WIDTH) for linear in linears]
    pairs = -(-linears[0].inputs // (2 * BLOCK)) * BLOCK
    panels, biases = lined((sum(counts), pairs, WIDTH // 2), np.uint64), np.zeros(sum(counts) * WIDTH, np.float32)
    first = 0
    for linear, count in zip(linears, counts, strict=True):
        own = panels[first : first + count]
        own[:] = panels_of_pairs(linear.plain(), BLOCK)
        linear.replace(TilePanels(linear.outputs, own))
        if linear.bias is not None:
            torch.from_numpy(biases)[first * WIDTH :][: linear.outputs] = linear.bias
        first += count
    return Weight(panels, biases)
