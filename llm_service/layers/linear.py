"""Linear layers whose weight is the concatenation of several in the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PackedLinear(nn.Module):
    """y = x Wᵀ + b, where W stacks parts [out_i, in] that the checkpoint keeps apart (q, k and v; gate and up).

    One product over the stack reads the input once and starts one kernel in place of several.
    """

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts.values()), dtype=dtype), requires_grad=False) if bias else None

    def place(self, part: str, kind: str, tensor: Tensor) -> None:
        """Copies a checkpoint tensor (`kind` is weight or bias) into its part; raises ValueError on a wrong shape."""
        sizes = list(self.parts.items())
        begin = sum(size for name, size in sizes[: [name for name, _ in sizes].index(part)])
        target = getattr(self, kind)[begin : begin + self.parts[part]]
        if target.shape != tensor.shape:
            raise ValueError(f"{part}.{kind} is {tuple(tensor.shape)}, expected {tuple(target.shape)}")
        target.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in] → [n, sum of parts]."""
        return functional.linear(x, self.weight, self.bias)
