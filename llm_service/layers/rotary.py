"""Multimodal rotary positions (Qwen2-VL, arXiv 2409.12191): pairs of a head turn by time, height or width.

Qwen2-VL and Qwen2.5-VL give each of the three a run of pairs; Qwen3-VL deals them out in turns: t h w t h w … t t.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of x [n, heads, head_dim] by its angle."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + rotated * sine
