"""Who computes the small steps of a layer, between its products."""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

import torch
from torch import Tensor


class RowKernels(Protocol):
    """`common.kernels.rows_gpu` or `common.kernels.rows_cpu`."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor: ...

    def turned(
        self,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        queries: int,
        keys: int,
        gains: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor: ...

    def gated(self, x: Tensor) -> Tensor: ...


def row_kernels(x: Tensor) -> RowKernels | None:
    """Our own kernels for rows of the device and type of x; None where torch computes, or makes kernels of its own."""
    if torch.compiler.is_compiling():
        return None
    if x.device.type == "cuda" and _triton():
        from common.kernels import rows_gpu

        return rows_gpu
    if x.device.type == "cpu" and x.dtype == torch.float32:
        from common.kernels import rows_cpu

        return rows_cpu
    return None


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None
