"""The vision tower of Qwen2.5-VL (https://arxiv.org/abs/2502.13923): root-mean-square norms, a gated feed-forward part,
and, in all layers but the listed ones, attention in windows of 112 pixels. The packed sequence is put in window order
once, so that each window is a segment, and the rows are put back at the end. Parameters have the published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear
from common.media.item import Grid
from encoder_service.models import blocks
from encoder_service.models.attention import Segments
from encoder_service.models.tower import Packing, Rotary, RotaryTower


@dataclass(frozen=True, slots=True)
class Windows:
    """`order` [N / merge²] int64 puts merged squares into window order; `lengths` are the windows' patches."""

    order: Tensor
    lengths: list[int]


def windows(grids: Sequence[Grid], merge: int, side: int) -> Windows:
    """Windows of `side` × `side` merged squares over each frame group; those at the far edges are smaller.

    A frame group of 2 × 3 squares with side 2 has windows of squares 0 1 3 4 and 2 5.
    """
    orders: list[Tensor] = []
    lengths: list[int] = []
    first = 0
    for grid in grids:
        height, width = grid.h // merge, grid.w // merge
        squares = torch.arange(height * width).view(height, width)
        parts = [
            squares[top : top + side, left : left + side].flatten()
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        frame = torch.cat(parts)
        for group in range(grid.t):
            orders.append(frame + first + group * height * width)
            lengths.extend(len(part) * merge * merge for part in parts)
        first += grid.t * height * width
    return Windows(torch.cat(orders), lengths)


class FeedForward(blocks.FeedForwardPart):
    """The gated feed-forward part, [N, width] → [N, width]."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)
        self.act = blocks.activation(act)

    @property
    def products(self) -> tuple[Sequence[Linear], Linear]:
        return (self.gate_proj, self.up_proj), self.down_proj

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_proj(x, self.act) * self.up_proj(x))
        return out


class Qwen25VLTower(RotaryTower):
    """Patches [N, dim] of a packed batch → rows [N / merge², 1, out]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        width, heads = config["hidden_size"], config["num_heads"]
        super().__init__(config, width)
        self.out, self.levels = config["out_hidden_size"], 1
        self.window = config.get("window_size", 112) // self.merge // config["patch_size"]
        self.full = frozenset(config["fullatt_block_indexes"])
        self.longest = (None, (self.window * self.merge) ** 2)
        self.patch_embed = blocks.PatchEmbed(config, width, bias=False)
        inner, act = config["intermediate_size"], config.get("hidden_act", "silu")
        self.blocks = nn.ModuleList(
            blocks.Block(width, heads, (blocks.RMSNorm(width), blocks.RMSNorm(width)), FeedForward(width, inner, act))
            for _ in range(config["depth"])
        )
        self.merger = blocks.Merger(width, self.out, self.merge, blocks.RMSNorm(width))

    def pack(self, grids: Sequence[Grid], device: torch.device) -> Packing:
        local = windows(grids, self.merge, self.window)
        came, (order,) = self.pack_beside(grids, device, [local.order])
        rotary = Rotary(self._reorder(came.rotary.cos, order), self._reorder(came.rotary.sin, order))
        return Packing((*came.lengths, local.lengths), rotary, order)

    def embed(self, patches: Tensor, packing: Packing) -> Tensor:
        assert packing.order is not None
        return self._reorder(self.patch_embed(patches), packing.order)

    def encode(self, x: Tensor, rotary: Rotary, segments: Sequence[Segments]) -> Tensor:
        whole, local = segments
        for index, block in enumerate(self.blocks):
            x = block(x, whole if index in self.full else local, rotary)
        rows: Tensor = self.merger(x)
        return rows.unsqueeze(1)

    def _reorder(self, x: Tensor, order: Tensor) -> Tensor:
        """Moves whole squares of [N, …] into `order`."""
        squares = x.view(len(order), self.merge * self.merge, *x.shape[1:])
        return squares[order].flatten(0, 1)
