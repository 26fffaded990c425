"""Weights in fewer bits: in 8 with a loss, each output with a scale of its own; in 16 where nothing is lost.

A token of one request reads every weight once, so it takes as long as reading takes; a byte in place of two or four is
that much less to read. Products of many rows are bound by arithmetic: for them the weight is widened first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.cpu import selection

_HIGHEST = 127
_FEW = 16
"""Rows up to which the kernels of few rows are used."""
_KERNELS = frozenset({"llm_service.layers.cpu.int8_kernel:product"})
_NARROW = torch.bfloat16, torch.float16
_AT_ONCE = 64
"""Rows of a weight that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`values` int8 [outputs, inputs] times `scale` float32 [outputs] is the weight."""

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Rounds a weight [outputs, inputs]; the largest number of each output becomes ±127."""
        scale = weight.abs().amax(1).float().clamp(min=torch.finfo(torch.float32).tiny) / _HIGHEST
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for part, whole, factor in zip(values.split(1024), weight.split(1024), scale.split(1024), strict=True):
            part.copy_((whole.float() / factor.unsqueeze(1)).round_())
        return cls(values, scale)

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return _KERNELS if self.values.device.type == "cpu" else frozenset()

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs] as it is now."""
        return (self.values.float() * self.scale.unsqueeze(1)).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.flatten(0, -2)
        if rows.shape[0] <= _FEW and (rows.device.type == "cuda" or selection.is_numba()):
            out = _few_rows(rows, self.values, self.scale)
        elif x.dtype == torch.float16:  # sums of eight-bit numbers may be too large for it
            out = functional.linear(rows, self.wide(x.dtype))
        else:
            out = (functional.linear(rows, self.values.to(x.dtype)) * self.scale).to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], len(self.values))


def narrowed(weight: Tensor) -> Tensor:
    """A float32 weight [n, k] in 16 bits if they have all of its numbers; else, or of another type, as it is."""
    for dtype in _NARROW if weight.dtype == torch.float32 else ():
        if all(torch.equal(part.to(dtype).float(), part) for part in weight.split(_AT_ONCE)):
            return weight.to(dtype)
    return weight


def _few_rows(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    if x.device.type == "cuda":
        from llm_service.layers.gpu import int8_kernel as int8_gpu

        return int8_gpu.product(x, values, scale)
    from llm_service.layers.cpu import int8_kernel as int8_cpu

    return int8_cpu.product(x.float(), values, scale).to(x.dtype)
