"""Weights in 8 bits: each output has a scale of its own, symmetric, and activations stay as they are.

A token of one request reads every weight once, so it takes as long as reading takes; a byte in place of two or four is
that much less to read. Products of many rows are bound by arithmetic: for them the weight is widened first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels import selection

_HIGHEST = 127
_FEW = 16
"""Rows up to which the kernels of few rows are used."""


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
    def kernel(self) -> str:
        """See `LaidOut`."""
        return "common.kernels.int8_cpu:product" if self.values.device.type == "cpu" else ""

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


def _few_rows(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    if x.device.type == "cuda":
        from common.kernels import int8_gpu

        return int8_gpu.product(x, values, scale)
    from common.kernels import int8_cpu

    return int8_cpu.product(x.float(), values, scale).to(x.dtype)
