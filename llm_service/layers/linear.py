"""Linear layers whose weight is the concatenation of several in the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from common.linear import Linear


class PackedLinear(Linear):
    """y = x Wᵀ + b, where W stacks parts [out_i, in] that the checkpoint keeps apart (q, k and v; gate and up).

    One product over the stack reads the input once and starts one kernel in place of several.
    """

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias, dtype=dtype)
        self.parts = parts

    def place(self, part: str, kind: str, tensor: Tensor) -> None:
        """Copies a checkpoint tensor (`kind` is weight or bias) into its part; raises ValueError on a wrong shape."""
        sizes = list(self.parts.items())
        begin = sum(size for name, size in sizes[: [name for name, _ in sizes].index(part)])
        target = getattr(self, kind)[begin : begin + self.parts[part]]
        if target.shape != tensor.shape:
            raise ValueError(f"{part}.{kind} is {tuple(tensor.shape)}, expected {tuple(target.shape)}")
        target.copy_(tensor)
