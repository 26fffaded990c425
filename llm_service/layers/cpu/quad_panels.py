"""An int8 weight for int8 rows (W8A8) on a CPU, in panels of 64 outputs with four inputs side by side, as AVX512-VNNI
and AMX multiply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from common.cpu.arrays import lined
from common.cpu.jit import Array
from common.cpu.vectors.tiles import BLOCK
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import quad_kernel, quad_tiles, selection
from llm_service.layers.cpu.quad_kernel import OFFSET, QUAD
from llm_service.layers.linear.quantized_weight import GroupedWeight, Number, QuantizedWeight, rounded_rows

_AT_ONCE = 64
"""Panels that are laid out, or multiplied by torch, at a time, so that this takes little memory beside them."""
_MOST_INPUTS = 1 << 16
"""The sum of so many products of numbers from −128 to 127 and from 0 to 255 fits into 32 bits."""


@dataclass(frozen=True, slots=True)
class QuadPanels:
    """w[o, i] = number[o, i] · scale[o], multiplied with rows of x[i] ≈ rounded[i] · s, where s is a row's largest
    number, whatever its sign, divided by 127.5, or `step` where that is not 0.

    `panels` uint32 [⌈outputs / 64⌉, ⌈inputs / 4⌉, 64] has four inputs' numbers in a word, the first in its lowest byte,
    each more by 128; `scale` float32 is [64 ⌈outputs / 64⌉]. Both are padded, with zeros that are 128 more as well.
    With `tiles` quads are padded to a multiple of 16.
    """

    outputs: int
    inputs: int
    panels: Array
    scale: Array
    step: float
    tiles: bool

    @classmethod
    def of(cls, parts: Sequence[QuantizedWeight], order: Tensor | None = None) -> QuadPanels | None:
        """Concatenates the outputs of weights over the same inputs, in panels; `order` int64 [outputs] says where each
        output goes. None if their format is another one, or the kernel does not run here."""
        if parts[0].codes.device.type != "cpu" or not selection.computes_bytes():
            return None
        if (whole := GroupedWeight.of_bytes(parts, order, _MOST_INPUTS)) is None:
            return None
        outputs, inputs = len(whole.codes), whole.inputs
        scale = np.zeros(-(-outputs // WIDTH) * WIDTH, np.float32)
        scale[:outputs] = (whole.scale[0].float() * whole.unit).numpy()
        tiles = selection.computes_byte_tiles()
        panels = _panels(whole.codes.view(torch.int8), BLOCK if tiles else 1)
        return cls(outputs, inputs, panels, scale, parts[0].input_scale, tiles)

    @property
    def number(self) -> Number:
        """The number format of the weight."""
        return Number.INT8

    @property
    def rounded_inputs(self) -> Number:
        """The number format that inputs are rounded to."""
        return Number.INT8

    @property
    def nbytes(self) -> int:
        """See `LaidOut`."""
        return int(self.panels.nbytes + self.scale.nbytes)

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return frozenset({f"{self._kernel.__name__}:product"})

    @property
    def _kernel(self) -> ModuleType:
        return quad_tiles if self.tiles else quad_kernel

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.reshape(-1, x.shape[-1]).float()
        wide = None if bias is None else bias.float()
        if selection.is_numba():
            out = torch.from_numpy(self.array_product(wide)(rows.numpy()))
        else:
            out = self._by_torch(rows, wide)
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def array_product(self, bias: Tensor | None = None) -> Callable[[Array], Array]:
        """The product of arrays, float32 [m, inputs] → [m, outputs]; ValueError for rows that do not fit."""
        given = {"panels": self.panels, "scale": self.scale, "bias": self.padded(bias), "step": self.step}
        return partial(self._kernel.product, **given, inputs=self.inputs, outputs=self.outputs)

    def padded(self, bias: Tensor | None) -> Array:
        """A bias as kernels take it, as long as `scale`; zeros for none."""
        added = np.zeros_like(self.scale)
        if bias is not None:
            added[: self.outputs] = bias.float().numpy()
        return added

    def _by_torch(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The same sums while our kernel is not compiled."""
        numbers, scales = rounded_rows(rows, self.step)
        every = []
        for first in range(0, len(self.panels), _AT_ONCE):
            words = self.panels[first : first + _AT_ONCE].view(np.uint8)
            weights = torch.from_numpy(words.view(np.int8) ^ np.int8(-OFFSET)).unflatten(2, (WIDTH, QUAD))
            weights = weights.transpose(1, 2).flatten(2).flatten(0, 1)[:, : self.inputs]
            every.append(torch._int_mm(numbers, weights.t()))
        sums = torch.cat(every, dim=1)[:, : self.outputs].float()
        out = sums * (torch.from_numpy(self.scale)[: self.outputs] * scales.unsqueeze(1))
        return out if bias is None else out + bias


def _panels(codes: Tensor, multiple: int) -> Array:
    """Numbers int8 [outputs, inputs] → panels as in `QuadPanels`, with a multiple of so many quads."""
    outputs, inputs = codes.shape
    count, quads = -(-outputs // WIDTH), -(-inputs // (QUAD * multiple)) * multiple
    words = lined((count, quads, WIDTH), np.uint32)
    out = torch.from_numpy(words.view(np.int8)).view(count, quads, WIDTH, QUAD)
    for part, rows in zip(out.split(_AT_ONCE), codes.split(_AT_ONCE * WIDTH), strict=True):
        padded = rows.new_zeros(len(part) * WIDTH, QUAD * quads)
        padded[: len(rows), :inputs] = rows
        part.copy_((padded ^ -OFFSET).view(len(part), WIDTH, quads, QUAD).transpose(1, 2))
    return words
