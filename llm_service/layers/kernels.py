"""When the small steps of a layer, between its products, are computed by our own kernels."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def has_kernels(x: Tensor) -> bool:
    """Whether `common.kernels.rows_gpu` is to compute with x: on a GPU, unless torch makes kernels of its own."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling() and _triton()


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None
