"""A weight on a CPU as oneDNN lays it out, and who multiplies with it.

torch's own products go through MKL, which is slow for a few rows and, on some processors, for many. oneDNN's inner
product is faster with a weight that has been laid out for it (docs/PERFORMANCE.md has the figures). Where the layout is
one that our kernel for few rows knows, both compute from the same memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

_HINT = 8
"""The number of rows that oneDNN chooses the layout for; other numbers are computed right as well."""
_PADDED = 4
"""Fewer than three rows are computed by oneDNN as this many, which is faster."""
FEW = 32
"""Rows up to which our kernel is faster."""
_WIDTH = 64
_NONE = ("none", "")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """`blocked` is oneDNN's opaque tensor of a weight [outputs, inputs].

    `panels` is the same memory, float32 [⌈outputs / 64⌉, inputs or more, 64], padded with zeros; None where it is laid
    out otherwise, or not meant for few rows.
    """

    outputs: int
    blocked: Tensor
    panels: Array | None

    @classmethod
    def of(cls, weight: Tensor, *, few_rows: bool = False) -> BlockedWeight | None:
        """Lays out a weight that is final; None where oneDNN does not take it. `few_rows`: few come at a time."""
        if weight.device.type != "cpu" or not weight.numel() or not _available(weight.dtype):
            return None
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)
        return cls(weight.shape[0], blocked, _panels(blocked, weight) if few_rows else None)

    def product(self, x: Tensor, bias: Tensor | None = None, activation: nn.Module | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], through an activation if one is given."""
        rows = x.shape[0] if x.dim() == 2 else 0
        if 0 < rows <= FEW and (few_rows := self.few_rows(bias)):
            return _through(activation, torch.from_numpy(few_rows(x.numpy())))
        fused = _fused(activation)
        name, variant = fused or _NONE
        if rows in (1, 2):
            x = functional.pad(x, (0, 0, 0, _PADDED - rows))
        out = torch.ops.mkldnn._linear_pointwise(x, self.blocked, bias, name, [], variant)
        out = out[:rows] if rows in (1, 2) else out
        return out if fused else _through(activation, out)

    def few_rows(self, bias: Tensor | None = None) -> Callable[[Array], Array] | None:
        """The product of up to `FEW` rows, float32 [m, inputs] → [m, outputs]; None where there are no panels."""
        if self.panels is None:
            return None
        from common.kernels import panels_cpu  # numba takes its time, and an encoder has many rows

        added = np.empty(0, np.float32) if bias is None else bias.numpy()
        return partial(panels_cpu.product, panels=self.panels, bias=added, outputs=self.outputs)


def _through(activation: nn.Module | None, x: Tensor) -> Tensor:
    activated: Tensor = x if activation is None else activation(x)
    return activated


def _fused(activation: nn.Module | None) -> tuple[str, str] | None:
    """oneDNN's name for an activation that it applies in the same pass, and its variant; None where it has none."""
    if activation is None:
        return _NONE
    if isinstance(activation, nn.GELU):
        return "gelu", activation.approximate
    return ("swish", "") if isinstance(activation, nn.SiLU) else None


def _panels(blocked: Tensor, weight: Tensor) -> Array | None:
    """The memory of an opaque tensor, which lives as long as that does, where it is laid out in panels.

    oneDNN does not say how it lays a weight out, and chooses by processor and shape: so the first and the last panel
    are held against the weight.
    """
    outputs, inputs = weight.shape
    count = math.ceil(outputs / _WIDTH)
    size = torch.ops.mkldnn._nbytes(blocked)
    width = size // (count * _WIDTH * weight.itemsize)
    if weight.dtype != torch.float32 or width < inputs or size != count * width * _WIDTH * weight.itemsize:
        return None
    address = torch.ops.mkldnn.data_ptr(blocked)
    memory = np.ctypeslib.as_array((ctypes.c_float * (size // weight.itemsize)).from_address(address))
    panels = memory.reshape(count, width, _WIDTH)
    for index in {0, count - 1}:
        expected = np.zeros((width, _WIDTH), np.float32)
        part = weight[index * _WIDTH : (index + 1) * _WIDTH].numpy()
        expected[:inputs, : len(part)] = part.T
        if not np.array_equal(panels[index], expected):
            return None
    return panels


def _available(dtype: torch.dtype) -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise", "_nbytes", "data_ptr")
    known = all(hasattr(torch.ops.mkldnn, name) for name in names)
    return known and torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16)
