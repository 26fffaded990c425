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
WIDTH = 64
"""Outputs of a panel, whose weights for one input lie side by side."""
_NONE = ("none", "")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """`blocked` is oneDNN's opaque tensor of a weight [outputs, inputs].

    `panels` is the same memory, float32 [⌈outputs / 64⌉, inputs or more, 64], padded with zeros; None where it is laid
    out otherwise, not meant for few rows, or the processor lacks the registers for our kernel.
    """

    outputs: int
    inputs: int
    blocked: Tensor
    panels: Array | None

    @classmethod
    def of(cls, weight: Tensor, *, few_rows: bool = False) -> BlockedWeight | None:
        """Lays out a weight that is final; None where oneDNN does not take it. `few_rows`: few come at a time."""
        if weight.device.type != "cpu" or not weight.numel() or not _available(weight.dtype):
            return None
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)
        outputs, inputs = weight.shape
        return cls(outputs, inputs, blocked, _panels(blocked, weight) if few_rows else None)

    def product(self, x: Tensor, bias: Tensor | None = None, activation: nn.Module | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], through an activation if one is given."""
        rows = x.shape[0] if x.dim() == 2 else 0
        if 0 < rows <= FEW and (ours := self.array_product(bias)):
            return _through(activation, torch.from_numpy(ours(x.numpy())))
        fused = _fused(activation)
        name, variant = fused or _NONE
        if rows in (1, 2):
            x = functional.pad(x, (0, 0, 0, _PADDED - rows))
        out = torch.ops.mkldnn._linear_pointwise(x, self.blocked, bias, name, [], variant)
        out = out[:rows] if rows in (1, 2) else out
        return out if fused else _through(activation, out)

    def array_product(self, bias: Tensor | None = None) -> Callable[[Array], Array] | None:
        """The product of up to `FEW` rows, float32 [m, inputs] → [m, outputs]; None where there are no panels.

        It raises ValueError for rows of another length.
        """
        if self.panels is None:
            return None
        from common.kernels import panels_cpu  # numba takes its time, and an encoder has many rows

        added = np.empty(0, np.float32) if bias is None else bias.numpy()
        return partial(panels_cpu.product, panels=self.panels, bias=added, shape=(self.outputs, self.inputs))


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
    """The memory of an opaque tensor, which lives as long as the array does, where it is laid out in panels.

    oneDNN does not say how it lays a weight out, and chooses by processor and shape: so the first panel, the last and
    one between are held against the weight.
    """
    outputs, inputs = weight.shape
    operators = torch.ops.mkldnn
    if weight.dtype != torch.float32 or not (hasattr(operators, "_nbytes") and hasattr(operators, "data_ptr")):
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    count, size = math.ceil(outputs / WIDTH), operators._nbytes(blocked) // weight.itemsize
    width = size // (count * WIDTH)
    if width < inputs or size != count * width * WIDTH:
        return None
    memory = (ctypes.c_float * size).from_address(operators.data_ptr(blocked))
    memory.owner = blocked
    panels = np.ctypeslib.as_array(memory).reshape(count, width, WIDTH)
    for index in {0, count // 2, count - 1}:
        expected = np.zeros((width, WIDTH), np.float32)
        part = weight[index * WIDTH : (index + 1) * WIDTH].numpy()
        expected[:inputs, : len(part)] = part.T
        if not np.array_equal(panels[index], expected):
            return None
    return panels


def _available(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and operators._is_mkldnn_bf16_supported())
