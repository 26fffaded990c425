"""A linear layer whose weight, on a CPU, is laid out for speed once it is loaded. Elsewhere it is an ordinary one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.blocked import Array, BlockedWeight
from common.int8 import Int8Weight


class Linear(nn.Module):
    """y = x Wᵀ + b; weight [outputs, inputs]. `settle` is called when the weight is final."""

    few_rows = False
    """Whether it is mostly given a few rows at a time."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self._blocked: BlockedWeight | None = None
        self._int8: Int8Weight | None = None

    def settle(self, *, shared: bool = False, int8: bool = False) -> None:
        """Lays the weight out for speed, or rounds it to 8 bits, and lets go of the plain one, unless it is `shared`
        with another module. What is settled stays as it is."""
        if self._int8 or self._blocked:
            return
        weight = self.weight.detach()
        if int8:
            self._int8 = Int8Weight.of(weight)
        else:
            self._blocked = BlockedWeight.of(weight, few_rows=self.few_rows)
        if not shared and (self._int8 or self._blocked):
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def array_product(self) -> Callable[[Array], Array] | None:
        """See `BlockedWeight.array_product`; None as well where the weight is not laid out."""
        return None if self._blocked is None else self._blocked.array_product(self.bias)

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """[…, inputs] → […, outputs], through an activation if one is given: oneDNN applies most in the same pass."""
        if self._blocked is not None:
            return self._blocked.product(x, self.bias, activation)
        if self._int8 is not None:
            out = self._int8.product(x.flatten(0, -2), self.bias).unflatten(0, x.shape[:-1])
        else:
            out = functional.linear(x, self.weight, self.bias)
        activated: Tensor = out if activation is None else activation(out)
        return activated


def settle_linears(module: nn.Module, *, int8: type[Linear] | None = None) -> None:
    """Settles every `Linear` in a module whose weights are final; those of the class `int8` are rounded to 8 bits."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for part in module.modules():
        if isinstance(part, Linear):
            part.settle(shared=owners[id(part.weight)] > 1, int8=int8 is not None and isinstance(part, int8))
