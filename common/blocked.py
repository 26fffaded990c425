"""A weight on a CPU as oneDNN lays it out.

torch's own products go through MKL, which is slow for a few rows and, on some processors, for many. oneDNN's inner
product is faster with a weight that has been laid out for it (docs/PERFORMANCE.md has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_HINT = 8
"""The number of rows that oneDNN chooses the layout for; other numbers are computed right as well."""
_PADDED = 4
"""Fewer than three rows are computed by oneDNN as this many, which is faster."""
_NONE = ("none", "")


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """`blocked` is oneDNN's opaque tensor of a weight [outputs, inputs]."""

    blocked: Tensor
    kernel = ""

    @classmethod
    def of(cls, weight: Tensor) -> BlockedWeight | None:
        """Lays out a weight that is final; None where oneDNN does not take it."""
        if weight.device.type != "cpu" or not weight.numel() or not _available(weight.dtype):
            return None
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, _HINT))

    def product(self, x: Tensor, bias: Tensor | None = None, activation: nn.Module | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], through an activation if one is given."""
        rows = x.shape[0] if x.dim() == 2 else 0
        fused = _fused(activation)
        name, variant = fused or _NONE
        if rows in (1, 2):
            x = functional.pad(x, (0, 0, 0, _PADDED - rows))
        out = torch.ops.mkldnn._linear_pointwise(x, self.blocked, bias, name, [], variant)
        out = out[:rows] if rows in (1, 2) else out
        return out if fused else through(activation, out)


def through(activation: nn.Module | None, x: Tensor) -> Tensor:
    """x after an activation, if there is one."""
    activated: Tensor = x if activation is None else activation(x)
    return activated


def _fused(activation: nn.Module | None) -> tuple[str, str] | None:
    """oneDNN's name for an activation that it applies in the same pass, and its variant; None where it has none."""
    if activation is None:
        return _NONE
    if isinstance(activation, nn.GELU):
        return "gelu", activation.approximate
    return ("swish", "") if isinstance(activation, nn.SiLU) else None


def _available(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and operators._is_mkldnn_bf16_supported())
