"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.kernels import has_kernels


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension; computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] or [n, heads, size] → the same."""
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
            from common.kernels.norm_cpu import rms_norm  # numba is of use to CPUs alone

            return rms_norm(x, self.weight, self.eps)
        if x.dim() == 2 and has_kernels(x):
            from common.kernels import rows_gpu

            return rows_gpu.rms_norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normal = functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normal.to(x.dtype)
