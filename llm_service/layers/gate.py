"""The gate of a feed-forward part."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from llm_service.layers.kernels import row_kernels


def silu_and_mul(x: Tensor) -> Tensor:
    """[n, 2 · inner] → silu(first half) · second half, [n, inner]."""
    if kernels := row_kernels(x):
        return kernels.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
