"""A linear layer whose weight, on a CPU, is laid out for speed once it is loaded. Elsewhere it is an ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.blocked import BlockedWeight, through
from common.int8 import Int8Weight
from common.panels import Array, PanelWeight


class LaidOut(Protocol):
    """A weight [outputs, inputs] in a form of its own."""

    @property
    def kernel(self) -> str:
        """The name of our kernel that multiplies with it, as `common.kernels.jit.find` takes it; empty where numba
        compiles none."""
        ...

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        ...


class Linear(nn.Module):
    """y = x Wᵀ + b; weight [outputs, inputs]. `finalize` is called when the weight is final."""

    panels = False
    """Whether the weight goes into panels, where there is a kernel for them."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self._laid_out: LaidOut | None = None

    def finalize(self, *, int8: bool = False) -> None:
        """Lays the weight out for speed, or rounds it to 8 bits, and lets go of the plain one, which another module may
        still have. What is finalized stays as it is."""
        if self._laid_out is not None:
            return
        self._laid_out = laid_out(self.weight.detach(), panels=self.panels, int8=int8)
        if self._laid_out is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def kernels(self) -> set[str]:
        """Names of our kernels that this needs; see `LaidOut`."""
        return {self._laid_out.kernel} - {""} if self._laid_out is not None else set()

    def array_product(self) -> Callable[[Array], Array] | None:
        """See `PanelWeight.array_product`; None where the weight is not in panels."""
        return self._laid_out.array_product(self.bias) if isinstance(self._laid_out, PanelWeight) else None

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """[…, inputs] → […, outputs], through an activation if one is given: oneDNN applies most in the same pass."""
        if isinstance(self._laid_out, BlockedWeight):
            return self._laid_out.product(x, self.bias, activation)
        if self._laid_out is not None:
            return through(activation, self._laid_out.product(x, self.bias))
        return through(activation, functional.linear(x, self.weight, self.bias))


def laid_out(weight: Tensor, *, panels: bool, int8: bool = False) -> LaidOut | None:
    """A weight that is final in the form that is computed with fastest here; None where that is as it is. With `int8`
    it is rounded to 8 bits, on any device."""
    if int8:
        return (PanelWeight.rounded(weight) if panels else None) or Int8Weight.of(weight)
    return (PanelWeight.of(weight) if panels else None) or BlockedWeight.of(weight)


def finalize_linears(module: nn.Module, *, int8: type[Linear] | None = None) -> None:
    """Finalizes every `Linear` of a module whose weights are final; the class `int8` is rounded to 8 bits."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.finalize(int8=int8 is not None and isinstance(part, int8))
