"""Norms and positions, of which every decoder layer is made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm_service.layers.ops import TORCH, RowOps


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang and Sennrich 2019)."""

    ops: RowOps = TORCH

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class MultimodalRotary:
    """Makes cosine and sine tables for a batch; built once, shared by all layers."""

    def __init__(
        self, head_dim: int, theta: float, sections: tuple[int, int, int], *, interleaved: bool, device: torch.device
    ) -> None:
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
        self._frequencies = 1.0 / theta ** (pairs / head_dim)  # [head_dim / 2]
        self._axis = torch.tensor(axis_of_pairs(sections, interleaved=interleaved), device=device)  # [head_dim / 2]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int [3, n] → cosine and sine, each [n, 1, head_dim] in `dtype`."""
        turns = positions[self._axis].float().t() * self._frequencies  # [n, head_dim / 2]
        turns = torch.cat([turns, turns], dim=-1).unsqueeze(1)
        return turns.cos().to(dtype), turns.sin().to(dtype)


def axis_of_pairs(sections: tuple[int, int, int], *, interleaved: bool) -> list[int]:
    """Which axis (0 time, 1 height, 2 width) turns each pair of a head.

    >>> axis_of_pairs((2, 1, 1), interleaved=False)
    [0, 0, 1, 2]
    >>> axis_of_pairs((2, 1, 1), interleaved=True)
    [0, 1, 2, 0]
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = [axis] * len(axes[axis : sections[axis] * 3 : 3])
    return axes
