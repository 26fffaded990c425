"""The gate of a feed-forward part, and when a layer's small steps are our own kernels'."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F


def has_kernels(x: Tensor) -> bool:
    """Whether `common.kernels.rows_gpu` is to compute with x: on a GPU, unless torch makes kernels of its own."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling() and _triton()


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def gated(x: Tensor) -> Tensor:
    """[n, 2 · inner] → silu(first half) · second half, [n, inner]."""
    if has_kernels(x):
        from common.kernels import rows_gpu

        return rows_gpu.gated(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
