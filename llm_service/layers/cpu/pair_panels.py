"""A weight on a CPU in bfloat16, in panels of 64 outputs where two inputs lie side by side, as AVX512-BF16 multiplies
them, and AMX, whose tiles are faster. Rows are rounded to bfloat16; sums are float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from common.cpu.arrays import lined
from common.cpu.jit import Array
from common.cpu.vectors.tiles import BLOCK
from llm_service.layers.cpu import pair_kernel, selection, tile_kernel
from llm_service.layers.cpu.panel_kernel import WIDTH

_AT_ONCE = 64
"""Panels that are laid out, or multiplied with by torch, at a time, so that this takes little memory beside them."""


@dataclass(frozen=True, slots=True)
class PairPanels:
    """A weight [outputs, inputs] as `panels` [⌈outputs / 64⌉, ⌈inputs / 2⌉, 32] uint64, padded with zeros: the 64 words
    of 32 bits of a pair have one output each, of the first input in the lower half. With `tiles` pairs are padded to a
    multiple of 16."""

    outputs: int
    inputs: int
    panels: Array
    tiles: bool

    @classmethod
    def of(cls, weight: Tensor) -> PairPanels | None:
        """Lays out a weight [outputs, inputs] that is final, rounded; None where the kernel does not run."""
        if weight.device.type != "cpu" or not weight.numel() or not selection.computes_bfloat16():
            return None
        tiles = selection.computes_tiles()
        return cls(weight.shape[0], weight.shape[1], _panels(weight, BLOCK if tiles else 1), tiles)

    @property
    def nbytes(self) -> int:
        """See `LaidOut`."""
        return int(self.panels.nbytes)

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return frozenset({f"{self._kernel.__name__}:product"})

    @property
    def _kernel(self) -> ModuleType:
        return tile_kernel if self.tiles else pair_kernel

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.reshape(-1, self.inputs).float()
        wide = None if bias is None else bias.float()
        numba = selection.is_numba()
        out = torch.from_numpy(self.array_product(wide)(rows.numpy())) if numba else self._by_torch(rows, wide)
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def array_product(self, bias: Tensor | None = None) -> Callable[[Array], Array]:
        """The product of arrays, float32 [m, inputs] → [m, outputs]; ValueError for rows that do not fit."""
        added = None if bias is None else bias.numpy()
        product = self._kernel.product
        return partial(product, panels=self.panels, bias=added, inputs=self.inputs, outputs=self.outputs)

    def _by_torch(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product while our kernel is not there."""
        rows = x.bfloat16().float()
        out: Tensor = rows.new_empty(len(rows), len(self.panels), WIDTH)
        for first in range(0, len(self.panels), _AT_ONCE):
            pairs = torch.from_numpy(self.panels[first : first + _AT_ONCE].view(np.int16)).view(torch.bfloat16)
            weights = pairs.view(len(pairs), -1, WIDTH, 2).transpose(2, 3).flatten(1, 2)[:, : self.inputs].float()
            out[:, first : first + len(weights)] = (rows @ weights).transpose(0, 1)
        out = out.flatten(1)[:, : self.outputs]
        return (out if bias is None else out + bias).contiguous()


def _panels(weight: Tensor, multiple: int) -> Array:
    outputs, inputs = weight.shape
    count, pairs = -(-outputs // WIDTH), -(-inputs // (2 * multiple)) * multiple
    words = lined((count, pairs, WIDTH // 2), np.uint64)
    out = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(count, pairs, WIDTH, 2)
    for part, rows in zip(out.split(_AT_ONCE), weight.split(_AT_ONCE * WIDTH), strict=True):
        padded = rows.new_zeros(len(part) * WIDTH, 2 * pairs, dtype=torch.bfloat16)
        padded[: len(rows), :inputs] = rows
        part.copy_(padded.view(len(part), WIDTH, pairs, 2).transpose(1, 2))
    return words
