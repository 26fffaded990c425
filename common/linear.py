"""A linear layer whose weight, on a CPU, is laid out for oneDNN once it is loaded.

torch's own products go through MKL, which is slow for a few rows and, on some processors, for many. oneDNN's inner
product reads a pre-blocked weight at the speed of memory for 3 to 8 rows (docs/PERFORMANCE.md has the figures), so one
or two rows are padded. Elsewhere, and where the operators are missing, this is an ordinary linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.int8 import Int8Weight

_HINT = 8
"""The number of rows that the layout is chosen for; other numbers are computed right as well."""
_PADDED = 4
"""Fewer than three rows are computed as this many, which is faster."""


class Linear(nn.Module):
    """y = x Wᵀ + b; weight [outputs, inputs]. `settle` is called when the weight is final."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self._blocked: Tensor | None = None
        self._int8: Int8Weight | None = None

    def settle(self, *, shared: bool = False, int8: bool = False) -> None:
        """Lays the weight out for speed, or rounds it to 8 bits, and lets go of the plain one, unless it is `shared`
        with another module."""
        if int8:
            self._int8 = Int8Weight.of(self.weight.detach())
        elif not self._lay_out():
            return
        if not shared:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def _lay_out(self) -> bool:
        if self.weight.device.type != "cpu" or not _available(self.weight.dtype):
            return False
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _HINT)
        return True

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """[…, inputs] → […, outputs], through an activation if one is given: oneDNN applies most in the same pass."""
        if self._int8 is not None:
            out = self._int8.product(x.flatten(0, -2), self.bias).unflatten(0, x.shape[:-1])
        elif self._blocked is None:
            out = functional.linear(x, self.weight, self.bias)
        elif fused := _fused(activation):
            return self._product(x, self._blocked, fused)
        else:
            out = self._product(x, self._blocked, _NONE)
        activated: Tensor = out if activation is None else activation(out)
        return activated

    def _product(self, x: Tensor, blocked: Tensor, fused: tuple[str, str]) -> Tensor:
        rows = x.shape[0] if x.dim() == 2 else 0
        if rows in (1, 2):
            x = functional.pad(x, (0, 0, 0, _PADDED - rows))
        name, variant = fused
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, self.bias, name, [], variant)
        return out[:rows] if rows in (1, 2) else out


_NONE = ("none", "")


def _fused(activation: nn.Module | None) -> tuple[str, str] | None:
    """oneDNN's name for an activation, and its variant; None where it has none."""
    if activation is None:
        return _NONE
    if isinstance(activation, nn.GELU):
        return "gelu", activation.approximate
    return ("swish", "") if isinstance(activation, nn.SiLU) else None


def settle_linears(module: nn.Module, *, int8: type[Linear] | None = None) -> None:
    """Settles every `Linear` in a module whose weights are final; those of the class `int8` are rounded to 8 bits."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for part in module.modules():
        if isinstance(part, Linear):
            part.settle(shared=owners[id(part.weight)] > 1, int8=int8 is not None and isinstance(part, int8))


def _available(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    known = hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")
    return known and torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16)
