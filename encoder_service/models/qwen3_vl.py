"""The vision tower of Qwen3-VL: a learned position table stretched to each grid, and deepstack levels.

After each listed layer a merger of its own gives one more level of rows. After https://arxiv.org/abs/2511.21631; the
names of parameters are the published checkpoints'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear
from common.media.item import Grid
from encoder_service.models import blocks
from encoder_service.models.attention import Segments
from encoder_service.models.tower import Packing, Rotary, RotaryTower, patch_positions


class FeedForward(blocks.FeedForwardPart):
    """[N, width] → [N, width]."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.linear_fc1 = Linear(width, inner)
        self.act = blocks.activation(act)
        self.linear_fc2 = Linear(inner, width)

    @property
    def products(self) -> tuple[Sequence[Linear], Linear]:
        return (self.linear_fc1,), self.linear_fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(blocks.activated(self.linear_fc1, self.act, x))
        return out


class Merger(nn.Module):
    """Joins each square into one row, [N, width] → [N / merge², out]; a deepstack merger norms after joining."""

    def __init__(self, width: int, out: int, merge: int, *, norm_joined: bool) -> None:
        super().__init__()
        self.joined = width * merge * merge
        self.norm_joined = norm_joined
        self.norm = blocks.layer_norm(self.joined if norm_joined else width)
        self.linear_fc1 = Linear(self.joined, self.joined)
        self.act = nn.GELU()
        self.linear_fc2 = Linear(self.joined, out)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.norm(x.view(-1, self.joined)) if self.norm_joined else self.norm(x).view(-1, self.joined)
        out: Tensor = self.linear_fc2(self.linear_fc1(joined, self.act))
        return out


class Qwen3VLTower(RotaryTower):
    """Patches [N, dim] of a packed batch → rows [N / merge², 1 + deepstack levels, out]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        width, heads, out = config["hidden_size"], config["num_heads"], config["out_hidden_size"]
        super().__init__(config, width)
        self.side = int(config["num_position_embeddings"] ** 0.5)
        self.level_of = {layer: level for level, layer in enumerate(config.get("deepstack_visual_indexes") or ())}
        self.out, self.levels = out, 1 + len(self.level_of)
        self.patch_embed = blocks.PatchEmbed(config, width, bias=True)
        # A table that nn.Embedding fills by itself, on no device, has torch import its compiler: 1.4 s of a core.
        self.pos_embed = nn.Embedding.from_pretrained(torch.empty(config["num_position_embeddings"], width))
        inner, act = config["intermediate_size"], config.get("hidden_act", "gelu_pytorch_tanh")
        self.blocks = nn.ModuleList(
            blocks.Block(
                width, heads, (blocks.layer_norm(width), blocks.layer_norm(width)), FeedForward(width, inner, act)
            )
            for _ in range(config["depth"])
        )
        self.merger = Merger(width, out, self.merge, norm_joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(width, out, self.merge, norm_joined=True) for _ in self.level_of
        )

    def pack(self, grids: Sequence[Grid], device: torch.device) -> Packing:
        packing, (entries, shares) = self.pack_beside(grids, device, corners(grids, self.merge, self.side))
        return replace(packing, corners=(entries, shares))

    def embed(self, patches: Tensor, packing: Packing) -> Tensor:
        hidden: Tensor = self.patch_embed(patches)
        return hidden + self._table(packing).to(hidden.dtype)

    def encode(self, x: Tensor, rotary: Rotary, segments: Sequence[Segments]) -> Tensor:
        deep = []
        for index, block in enumerate(self.blocks):
            x = block(x, segments[0], rotary)
            if index in self.level_of:
                deep.append(self.deepstack_merger_list[self.level_of[index]](x))
        return torch.stack([self.merger(x), *deep], dim=1)

    def _table(self, packing: Packing) -> Tensor:
        """The position table [side², width], stretched to each grid: [N, width] float32."""
        assert packing.corners is not None
        entries, shares = packing.corners
        total: Tensor = self.pos_embed(entries[0]) * shares[0]
        for entry, share in zip(entries[1:], shares[1:], strict=True):
            total += self.pos_embed(entry) * share
        return total


def corners(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """For each patch of a packed batch, the four entries of a side × side table around it, and their weights.

    Entries [4, N] int64, weights [4, N, 1] float32. Corners of a grid map to corners of the table, and positions in
    between are interpolated bilinearly. The whole batch is computed on the host at once: a GPU would spend more on
    launches than on the arithmetic.
    """
    cells = torch.cat([patch_positions(grid, merge).repeat(grid.t, 1) for grid in grids]).float()
    counts = torch.tensor([grid.patches for grid in grids])
    last = torch.tensor([[max(grid.h - 1, 1), max(grid.w - 1, 1)] for grid in grids]).repeat_interleave(counts, 0)
    at = cells * (side - 1) / last
    low = at.floor()
    part, near = at - low, low.long()
    far = (near + 1).clamp(max=side - 1)
    entries, shares = [], []
    for row, down in ((near[:, 0], 1 - part[:, 0]), (far[:, 0], part[:, 0])):
        for column, across in ((near[:, 1], 1 - part[:, 1]), (far[:, 1], part[:, 1])):
            entries.append(row * side + column)
            shares.append((down * across)[:, None])
    return torch.stack(entries), torch.stack(shares)
