"""What a decoder does to its rows between two products: norms, rotary positions, gates; and who does it, torch's
operators or a device's kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Pair = tuple[Tensor, Tensor]


class RowOps(Protocol):
    """Done by `TorchOps`, by Triton's kernels (`gpu.row_kernels`) or by numba's (`cpu.row_kernels.NumbaOps`)."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """x [n, size], whose rows may be apart, over the root of each row's mean square, times gain [size] → [n, size].
        Computed in float32, returned in the type of x."""
        ...

    def qk_norm_rotary(
        self, x: Tensor, rotary: Pair, queries: int, keys: int, gains: Pair | None, eps: float
    ) -> Tensor:
        """Rotates the first heads of x [n, queries + keys or more, head_dim] by the angles of each token → [n, queries
        + keys, head_dim].

        `rotary` is cosine and sine, [n, 1, head_dim] each, in the type of x. With `gains`, [head_dim] for queries and
        for keys, each head is first normed.
        """
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [n, 2 · inner] → silu(first half) · second half, [n, inner]."""
        ...


class TorchOps:
    """Torch's operators, for every device and type; see `RowOps`."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """[n, size] or [n, heads, size] → the same."""
        if x.dtype == torch.float32:
            return functional.rms_norm(x, gain.shape, gain, eps)
        return gain * functional.rms_norm(x.float(), gain.shape, None, eps).to(x.dtype)

    def qk_norm_rotary(
        self, x: Tensor, rotary: Pair, queries: int, keys: int, gains: Pair | None, eps: float
    ) -> Tensor:
        """See `RowOps`."""
        heads = x[:, : queries + keys]
        if gains is not None:
            both = zip(heads.split([queries, keys], dim=1), gains, strict=True)
            heads = torch.cat([self.rms_norm(part, gain, eps) for part, gain in both], dim=1)
        return apply_rotary(heads, *rotary)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `RowOps`."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


TORCH = TorchOps()


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of x [n, heads, head_dim] by its angle."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + rotated * sine


def use_ops(module: nn.Module, ops: RowOps) -> None:
    """Has every part of a module that has `ops` compute with these."""
    for part in module.modules():
        if hasattr(part, "ops"):
            vars(part)["ops"] = ops


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
