"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.kernels import row_kernels


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension; computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] or [n, heads, size] → the same."""
        if x.dim() == 2 and (kernels := row_kernels(x)):
            return kernels.rms_norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normal = functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normal.to(x.dtype)
