"""The vision tower of Qwen2-VL: layer norms, a plain feed-forward part, full attention inside each frame group.

After https://arxiv.org/abs/2409.12191; the names of parameters are the published checkpoints'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from encoder_service.models import blocks
from encoder_service.models.attention import Segments
from encoder_service.models.tower import Packing, Rotary, RotaryTower


class Qwen2VLTower(RotaryTower):
    """Patches [N, dim] of a packed batch → rows [N / merge², 1, out]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        width, heads = config["embed_dim"], config["num_heads"]
        super().__init__(config, width)
        self.out, self.levels = config["hidden_size"], 1
        self.patch_embed = blocks.PatchEmbed(config, width, bias=False)
        inner, act = int(width * config.get("mlp_ratio", 4)), config.get("hidden_act", "quick_gelu")

        def block() -> blocks.Block:
            norms = blocks.layer_norm(width), blocks.layer_norm(width)
            return blocks.Block(width, heads, norms, blocks.FeedForward(width, inner, act))

        self.blocks = nn.ModuleList(block() for _ in range(config["depth"]))
        self.merger = blocks.Merger(width, self.out, self.merge, blocks.layer_norm(width))

    def embed(self, patches: Tensor, packing: Packing) -> Tensor:  # noqa: ARG002
        hidden: Tensor = self.patch_embed(patches)
        return hidden

    def encode(self, x: Tensor, rotary: Rotary, segments: Sequence[Segments]) -> Tensor:
        for block in self.blocks:
            x = block(x, segments[0], rotary)
        rows: Tensor = self.merger(x)
        return rows.unsqueeze(1)
