"""Who computes the small steps of a layer, between its products."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from common import log
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.selection import wide_vectors

_log = log.get("kernels")


class RowKernels(Protocol):
    """`llm_service.layers.gpu.row_kernels` or `llm_service.layers.cpu.row_kernels`."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor: ...

    def qk_norm_rotary(
        self,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        queries: int,
        keys: int,
        gains: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor: ...

    def silu_and_mul(self, x: Tensor) -> Tensor: ...


def row_kernels(x: Tensor) -> RowKernels | None:
    """Our own kernels for rows of the device and type of x; None where torch computes, or makes kernels of its own."""
    if torch.compiler.is_compiling():
        return None
    if x.device.type == "cuda" and _compiles(x.device):
        from llm_service.layers.gpu import row_kernels as rows_gpu

        return rows_gpu
    if x.device.type == "cpu" and x.dtype == torch.float32 and selection.is_numba():
        from llm_service.layers.cpu import row_kernels as rows_cpu

        return rows_cpu
    return None


def row_kernel_names(x: Tensor) -> set[str]:
    """Names of what `row_kernels` for rows of the device and type of x has numba compile, as `jit.find` takes them."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return set()
    steps = ["rms_norm", "qk_norm_rotary", "silu_and_mul"] if wide_vectors() else ["rms_norm", "qk_norm_rotary"]
    return {f"llm_service.layers.cpu.row_kernels:{step}_{rows}" for rows in ("few", "many") for step in steps}


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton runs here: it comes with torch, and still lacks a C compiler, or a folder that it may write to."""
    try:
        from llm_service.layers.gpu import row_kernels as rows_gpu

        rows_gpu.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
    except Exception as error:  # noqa: BLE001 - whatever it fails with, torch computes the same
        _log.warning("our kernels do not run on this device", cause=str(error)[:500])
        return False
    return True
