"""The vision tower of Qwen2-VL: layer norms, a plain feed-forward part, full attention inside each frame group.

After https://arxiv.org/abs/2409.12191; the names of parameters are the published checkpoints'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.linear import Linear
from common.media.item import Grid
from encoder_service.models import blocks
from encoder_service.models.attention import Segments
from encoder_service.models.tower import PackedTower, Packing, Rotary


class FeedForward(nn.Module):
    """[N, width] → [N, width]."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.fc1 = Linear(width, inner)
        self.act = blocks.activation(act)
        self.fc2 = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x, self.act))
        return out


class Qwen2VLTower(PackedTower):
    """Patches [N, dim] of a packed batch → rows [N / merge², 1, out]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["embed_dim"], config["num_heads"]
        self.width, self.out, self.levels = width, config["hidden_size"], 1
        self.merge = config["spatial_merge_size"]
        self.head_dim = width // heads
        self.theta = (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        channels = config.get("in_channels", config.get("in_chans", 3))
        self.patch_embed = blocks.PatchEmbed(
            width, channels, config["temporal_patch_size"], config["patch_size"], bias=False
        )
        inner, act = int(width * config.get("mlp_ratio", 4)), config.get("hidden_act", "quick_gelu")
        self.blocks = nn.ModuleList(
            blocks.Block(width, heads, (_norm(width), _norm(width)), FeedForward(width, inner, act))
            for _ in range(config["depth"])
        )
        self.merger = blocks.Merger(width, self.out, self.merge, _norm(width))

    def pack(self, grids: Sequence[Grid], device: torch.device) -> Packing:
        rotary = blocks.rotary(grids, self.merge, self.head_dim, self.theta, device)
        return Packing((blocks.frame_groups(grids),), rotary)

    def embed(self, patches: Tensor, grids: Sequence[Grid], packing: Packing) -> Tensor:  # noqa: ARG002
        hidden: Tensor = self.patch_embed(patches)
        return hidden

    def encode(self, x: Tensor, rotary: Rotary, segments: Sequence[Segments]) -> Tensor:
        for block in self.blocks:
            x = block(x, segments[0], rotary)
        rows: Tensor = self.merger(x)
        return rows.unsqueeze(1)


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=blocks.EPSILON)
