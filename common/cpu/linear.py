"""A linear layer whose weight is laid out for oneDNN once it is loaded, if it is on a CPU. Elsewhere it is an ordinary
one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

_HINT = 8
"""The number of rows that oneDNN chooses the layout for; other numbers are computed right as well."""
_PADDED = 4
"""Fewer than three rows are padded to this many for oneDNN, which is faster."""
_NONE = ("none", "")


class LaidOut(Protocol):
    """A weight [outputs, inputs] in a form of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        ...

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        ...


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """`blocked` is oneDNN's opaque tensor of a weight [outputs, inputs].

    torch's own products go through MKL, which is slow for a few rows and, on some processors, for many.
    """

    blocked: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> BlockedWeight | None:
        """Lays out a final weight. None if oneDNN does not take it."""
        if weight.device.type != "cpu" or not weight.numel() or not _available(weight.dtype):
            return None
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, _HINT))

    @property
    def nbytes(self) -> int:
        """See `LaidOut`."""
        return self.blocked.numel() * self.blocked.element_size()

    def plain(self) -> Tensor:
        """The weight as it was, to the bit."""
        plain: Tensor = self.blocked.to_dense()
        return plain

    def product(self, x: Tensor, bias: Tensor | None = None, activation: nn.Module | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], through an activation if one is given."""
        rows = x.shape[0] if x.dim() == 2 else 0
        fused = _fused(activation)
        name, variant = fused or _NONE
        if rows in (1, 2):
            x = functional.pad(x, (0, 0, 0, _PADDED - rows))
        out = torch.ops.mkldnn._linear_pointwise(x, self.blocked, bias, name, [], variant)
        out = out[:rows] if rows in (1, 2) else out
        return out if fused else _through(activation, out)


class Linear(nn.Module):
    """y = x Wᵀ + b; weight [outputs, inputs]. `finalize` is called when the weight is final."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight: Tensor = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self.laid_out: LaidOut | None = None

    def finalize(self) -> None:
        """Lays the weight out for speed and releases the plain one, which another module may still hold. Does nothing
        the second time."""
        if self.laid_out is None:
            self._replace_weight(BlockedWeight.of(self.weight.detach()))

    def plain(self) -> Tensor:
        """The weight [outputs, inputs], as loaded or as `finalize` laid it out."""
        return self.laid_out.plain() if isinstance(self.laid_out, BlockedWeight) else self.weight.detach()

    def replace(self, laid_out: LaidOut) -> None:
        """Computes with another layout of the weight from now on, and releases the one before."""
        self._replace_weight(laid_out)

    def _replace_weight(self, laid_out: LaidOut | None) -> None:
        self.laid_out = laid_out
        if laid_out is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """[…, inputs] → […, outputs], through an activation if one is given: oneDNN applies most in the same pass."""
        if isinstance(self.laid_out, BlockedWeight):
            return self.laid_out.product(x, self.bias, activation)
        if self.laid_out is not None:
            return _through(activation, self.laid_out.product(x, self.bias))
        return _through(activation, functional.linear(x, self.weight, self.bias))


def finalize_linears(module: nn.Module) -> None:
    """Finalizes every `Linear` of a module whose weights are final."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.finalize()


def _through(activation: nn.Module | None, x: Tensor) -> Tensor:
    """x after the activation, if there is one."""
    activated: Tensor = x if activation is None else activation(x)
    return activated


def _fused(activation: nn.Module | None) -> tuple[str, str] | None:
    """oneDNN's name and variant of an activation that it can fuse; None if it cannot."""
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
