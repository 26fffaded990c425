"""A weight on a CPU in panels of 64 outputs, stored in the shortest dtype that holds it without loss: a float32 weight
that came from 16 bits goes back to 16 bits, and takes half the memory and the time to read. The kernel widens weights
as it reads them; products and sums are those of float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.cpu.arrays import lined
from common.cpu.jit import Array
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import panel_kernel, selection
from llm_service.layers.cpu.selection import fused_vectors, wide_vectors
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight
from llm_service.layers.linear.weight_dtype import narrowed

_PAIR = 32
"""Outputs of bfloat16 that lie in one line of a cache, two to a word: the first with the 17th, and so on."""
_AT_ONCE = 64
"""Panels that are laid out at a time, so that this takes little memory beside the weight's."""
_STORED = {torch.bfloat16: np.uint32, torch.float16: np.uint16}
"""The array dtype by which the kernel knows what it holds; other dtypes map to themselves."""


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight [outputs, inputs] as `panels` [⌈outputs / 64⌉, inputs, 64], padded with zeros, times `scale` float32
    [outputs] if there is one.

    The panels are float32, float16 (as uint16), int8, or pairs of bfloat16 (as uint32 [⌈outputs / 64⌉, inputs, 32]:
    word l of a line of 16 has outputs l, in its lower half, and 16 + l of the line's 32).
    """

    outputs: int
    panels: Array
    scale: Array | None = None

    @classmethod
    def of(cls, weight: Tensor) -> PanelWeight | None:
        """Lays out a weight [outputs, inputs] that is final, without loss; None where the kernel does not compute what
        this weight's type or device does."""
        if weight.dtype != torch.float32 or not (_fits(weight) and fused_vectors()):
            return None
        return cls(weight.shape[0], in_panels(narrowed(weight)))

    @classmethod
    def rounded(cls, weight: Tensor) -> PanelWeight | None:
        """The same in 8 bits, with their loss, and for any type of floats. Processors without AVX-512 have these in
        `QuantizedPanels`."""
        if not (_fits(weight) and wide_vectors()):
            return None
        rounded = QuantizedWeight.rounded(weight)
        return cls(weight.shape[0], in_panels(rounded.codes.view(torch.int8)), rounded.scale[:, 0].numpy())

    @property
    def number(self) -> Number | None:
        """The number format of a weight that was quantised."""
        return None if self.scale is None else Number.INT8

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return self.panels.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return frozenset({f"llm_service.layers.cpu.panel_kernel:{self.panels.dtype}"})

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.reshape(-1, x.shape[-1]).float().numpy()
        wide = None if bias is None else bias.float()
        out = torch.from_numpy(self.array_product(wide)(rows)) if selection.is_numba() else self._by_torch(rows, wide)
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def array_product(self, bias: Tensor | None = None) -> Callable[[Array], Array]:
        """The product of arrays, float32 [m, inputs] → [m, outputs]; ValueError for rows that do not fit."""
        added = None if bias is None else bias.numpy()
        return partial(panel_kernel.product, panels=self.panels, scale=self.scale, bias=added, outputs=self.outputs)

    def _by_torch(self, x: Array, bias: Tensor | None) -> Tensor:
        """The product while our kernel is not compiled: some panels at a time are widened to float32, for each product
        anew."""
        rows = torch.from_numpy(x)
        out: Tensor = rows.new_empty(len(rows), len(self.panels), WIDTH)
        for first in range(0, len(self.panels), _AT_ONCE):
            weights = widened_panels(self.panels[first : first + _AT_ONCE])
            out[:, first : first + len(weights)] = (rows @ weights).transpose(0, 1)
        out = out.flatten(1)[:, : self.outputs]
        out = out if self.scale is None else out * torch.from_numpy(self.scale)
        return (out if bias is None else out + bias).contiguous()


def _fits(weight: Tensor) -> bool:
    """Whether a kernel may have this weight in panels."""
    return weight.device.type == "cpu" and weight.numel() > 0 and selection.allows_panels()


def in_panels(weight: Tensor) -> Array:
    """A weight [outputs, inputs] as `PanelWeight` has it."""
    outputs, inputs = weight.shape
    count = -(-outputs // WIDTH)
    room = lined((count, inputs, WIDTH * weight.itemsize), np.uint8)
    out = torch.from_numpy(room).view(weight.dtype)
    for part, rows in zip(out.split(_AT_ONCE), weight.split(_AT_ONCE * WIDTH), strict=True):
        padded = rows.new_zeros(len(part) * WIDTH, inputs)
        padded[: len(rows)] = rows
        numbers = padded.view(len(part), WIDTH, inputs).transpose(1, 2)
        if weight.dtype == torch.bfloat16:
            numbers = numbers.unflatten(2, (WIDTH // _PAIR, 2, _PAIR // 2)).transpose(3, 4).flatten(2)
        part.copy_(numbers)
    if weight.dtype not in _STORED:
        return out.numpy()
    return out.view(torch.int16).numpy().view(_STORED[weight.dtype])


def widened_panels(panels: Array) -> Tensor:
    """Panels, as they are stored, in float32: [p, inputs, 64]."""
    if panels.dtype == np.uint16:
        return torch.from_numpy(panels.view(np.int16)).view(torch.float16).float()
    if panels.dtype != np.uint32:
        return torch.from_numpy(panels).float()
    numbers = torch.from_numpy(panels.view(np.int16)).view(torch.bfloat16).float()
    return numbers.view(*numbers.shape[:2], WIDTH // _PAIR, _PAIR // 2, 2).transpose(3, 4).flatten(2)
