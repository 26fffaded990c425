"""What the towers share: rotary positions, patch embedding, attention, feed-forward blocks, mergers.

A batch is one packed sequence of patches [N, …], see `tower` and `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.linear import Linear
from common.media.item import Grid
from encoder_service.models.attention import Segments
from encoder_service.models.tower import Rotary

EPSILON = 1e-6


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates [N, heads, head_dim] in float32, the first half of a head against the second."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    left, right = rotated.chunk(2, dim=-1)
    torch.mul(first, rotary.cos, out=left).addcmul_(second, rotary.sin, value=-1)
    torch.mul(second, rotary.cos, out=right).addcmul_(first, rotary.sin)
    return rotated.to(x.dtype)


def patch_positions(grid: Grid, merge: int) -> Tensor:
    """The (row, column) of each patch of one frame group, [h·w, 2], in the order that patches come in.

    Patches of one merge × merge square stand together. A 2 × 4 grid with merge 2 gives
    (0,0) (0,1) (1,0) (1,1) (0,2) (0,3) (1,2) (1,3).
    """
    rows = torch.arange(grid.h).view(grid.h // merge, 1, merge, 1)
    columns = torch.arange(grid.w).view(1, grid.w // merge, 1, merge)
    shape = (grid.h // merge, grid.w // merge, merge, merge)
    return torch.stack([rows.expand(shape).flatten(), columns.expand(shape).flatten()], dim=-1)


def rotary(grids: Sequence[Grid], merge: int, head_dim: int, theta: float, device: torch.device) -> Rotary:
    """Rotary tables of a packed batch: a head's first quarter turns by the patch's row, its second by the column."""
    half = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    positions = torch.cat([patch_positions(grid, merge).repeat(grid.t, 1) for grid in grids]).to(device)
    angles = (positions[:, :, None].float() * frequencies.to(device)).flatten(1)[:, None]
    return Rotary(angles.cos(), angles.sin())


def frame_groups(grids: Sequence[Grid]) -> list[int]:
    """Patches of each frame group of each item, which is a segment."""
    return [grid.h * grid.w for grid in grids for _ in range(grid.t)]


class PatchEmbed(nn.Module):
    """Flat patches to hidden states, [N, channels · temporal · patch²] → [N, width].

    In checkpoints it is a convolution whose stride is its kernel, which is a matrix product; `load_tower` flattens it.
    """

    def __init__(self, width: int, channels: int, temporal: int, patch: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = Linear(channels * temporal * patch * patch, width, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches)
        return out


class Attention(nn.Module):
    """Multi-head attention over a packed sequence, [N, width] → [N, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor, segments: Segments, positions: Rotary) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        out = segments(apply_rotary(q, positions), apply_rotary(k, positions), v)
        projected: Tensor = self.proj(out.flatten(1))
        return projected


class Block(nn.Module):
    """A pre-norm transformer block; the family gives the norms and the feed-forward part."""

    def __init__(self, width: int, heads: int, norms: tuple[nn.Module, nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = Attention(width, heads)
        self.mlp = mlp

    def forward(self, x: Tensor, segments: Segments, positions: Rotary) -> Tensor:
        x = x + self.attn(self.norm1(x), segments, positions)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Merger(nn.Module):
    """Joins each merge × merge square into one row, [N, width] → [N / merge², out]; names as in Qwen2-VL."""

    def __init__(self, width: int, out: int, merge: int, norm: nn.Module) -> None:
        super().__init__()
        self.joined = width * merge * merge
        self.ln_q = norm
        self.mlp = nn.Sequential(Linear(self.joined, self.joined), nn.GELU(), Linear(self.joined, out))

    def forward(self, x: Tensor) -> Tensor:
        first, act, second = self.mlp
        rows: Tensor = second(first(self.ln_q(x).view(-1, self.joined), act))
        return rows


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * wide.to(x.dtype)


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"quick_gelu": QuickGELU, "silu": nn.SiLU, "gelu": nn.GELU}


def activation(name: str) -> nn.Module:
    """The activation that config.json names; ValueError for one that is not known."""
    if name == "gelu_pytorch_tanh":
        return nn.GELU(approximate="tanh")
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation {name} is not supported")
    return ACTIVATIONS[name]()
