"""The tower of InternVL (https://arxiv.org/abs/2504.10479): a vision transformer that sees each tile by itself, with a
class token before its patches and learned positions; squares of patches are joined and projected. Parameters have the
published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.cpu.linear import Linear
from common.media.item import Grid
from encoder_service.models import blocks
from encoder_service.models.attention import Segments
from encoder_service.models.tower import Granularity, PackedTower, Packing, Pass, Rotary, patch_positions

_MERGE = 2


class Embeddings(nn.Module):
    """Patches [tiles · patches, dim], squares together, → hidden states [tiles, 1 + patches, width]."""

    def __init__(self, config: Mapping[str, Any], side: int) -> None:
        super().__init__()
        self.side, self.width = side, config["hidden_size"]
        dim = config["num_channels"] * config["patch_size"] ** 2
        self.patch_embeddings = nn.ModuleDict({"projection": Linear(dim, self.width)})
        # `load_tower` flattens tensors with more than two dimensions in checkpoints.
        self.cls_token = nn.Parameter(torch.empty(1, self.width))
        if config["use_mask_token"]:  # in checkpoints, for training alone
            self.mask_token = nn.Parameter(torch.empty(1, self.width))
        learned = torch.empty(1, (1 + side * side) * self.width)
        self.position_embeddings = nn.Parameter(learned) if config["use_absolute_position_embeddings"] else None

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.patch_embeddings["projection"](patches).unflatten(0, (-1, self.side**2))
        hidden = torch.cat([self.cls_token.expand(len(hidden), 1, -1), hidden], dim=1)
        return hidden if self.positions is None else hidden + self.positions

    @cached_property
    def positions(self) -> Tensor | None:
        """[1 + patches, width], in the order of patches."""
        if self.position_embeddings is None:
            return None
        rows, columns = patch_positions(Grid(1, self.side, self.side), _MERGE).unbind(1)
        order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + rows * self.side + columns])
        table = self.position_embeddings.view(-1, self.width)
        return table[order.to(table.device)]


class TileAttention(nn.Module):
    """Attention inside of each tile, [N, width] → [N, width]. Queries, keys and values are one product here, and three
    in checkpoints."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, bias = config["hidden_size"], config["attention_bias"]
        self.heads = config["num_attention_heads"]
        self.qkv = Linear(width, 3 * width, bias=bias)
        self.register_load_state_dict_pre_hook(_join)
        self.q_norm, self.k_norm = (blocks.RMSNorm(width) if config["use_qk_norm"] else nn.Identity() for _ in range(2))
        self.projection_layer = Linear(width, width)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=1)
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in (self.q_norm(q), self.k_norm(k), v))
        out: Tensor = self.projection_layer(segments(q, k, v).flatten(1))
        return out


def _join(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Puts a checkpoint's three projections together."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{part}_proj.{kind}" for part in "qkv"]
        if all(name in state for name in names):
            state[f"{prefix}qkv.{kind}"] = torch.cat([state.pop(name) for name in names])


class TileLayer(nn.Module):
    """A pre-norm transformer layer whose two parts are scaled by learned vectors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.attention = TileAttention(config)
        self.mlp = blocks.FeedForward(width, config["intermediate_size"], config["hidden_act"])
        self.layernorm_before, self.layernorm_after = _norm(config), _norm(config)
        self.lambda_1, self.lambda_2 = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = torch.addcmul(x, self.attention(self.layernorm_before(x), segments), self.lambda_1)
        return torch.addcmul(x, self.mlp(self.layernorm_after(x)), self.lambda_2)


def _norm(config: Mapping[str, Any]) -> nn.Module:
    width, epsilon = config["hidden_size"], config["layer_norm_eps"]
    match config["norm_type"]:
        case "layer_norm":
            return nn.LayerNorm(width, eps=epsilon)
        case "rms_norm":
            return blocks.RMSNorm(width, epsilon)
        case other:
            raise CheckpointError(f"the norm {other} is not supported")


class InternVLTower(PackedTower):
    """Patches [tiles · patches, dim] → rows [tiles · patches / 4, 1, out]. A tile is a segment with one more place than
    patches, for the class token, which gives no row."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        side, width = config["image_size"] // config["patch_size"], config["hidden_size"]
        patches = side * side
        super().__init__(width, config["num_attention_heads"], Granularity(patches, 1 + patches, patches // _MERGE**2))
        self.out, self.levels, self.longest = config["out_hidden_size"], 1, (1 + patches,)
        self.embeddings = Embeddings(config, side)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(TileLayer(config) for _ in range(config["num_hidden_layers"]))}
        )
        pooled = config["use_mean_pooling"]
        self.layernorm = nn.Identity() if pooled else nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.joined = width * _MERGE**2
        self.layer_norm = nn.LayerNorm(self.joined)
        self.linear_1 = Linear(self.joined, self.out)
        self.act = blocks.activation(config["projector_hidden_act"])
        self.linear_2 = Linear(self.out, self.out)

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        return layers

    def pack(self, grids: Sequence[Grid], device: torch.device) -> Packing:
        tiles = sum(grid.patches for grid in grids) // self.granularity.patches
        none = torch.empty(tiles * self.granularity.places, 1, 0, device=device)
        return Packing(([self.granularity.places] * tiles,), Rotary(none, none))

    def eagerly(self, packing: Packing, device: torch.device) -> Pass:
        """On a CPU, tile by tile: a layer's results for one stay in the cache, and its rows do not depend, to the bit,
        on the rest of the batch."""
        if device.type != "cpu":
            return super().eagerly(packing, device)
        return Pass(packing, (self.backend.over([self.granularity.places], device),))

    def run(self, patches: Tensor, ready: Pass) -> Tensor:
        if patches.device.type != "cpu":
            return super().run(patches, ready)
        packing = ready.packing
        each = (self.embed(tile, packing) for tile in patches.split(self.granularity.patches))
        return torch.cat([self.encode(tile, packing.rotary, ready.segments) for tile in each])

    def embed(self, patches: Tensor, packing: Packing) -> Tensor:  # noqa: ARG002
        hidden: Tensor = self.embeddings(patches)
        return hidden.flatten(0, 1)

    def encode(self, x: Tensor, rotary: Rotary, segments: Sequence[Segments]) -> Tensor:  # noqa: ARG002
        for layer in self.blocks:
            x = layer(x, segments[0])
        x = self.layernorm(x).view(-1, self.granularity.places, self.width)[:, 1:]
        joined = self.layer_norm(x.reshape(-1, self.joined))
        rows: Tensor = self.linear_2(self.linear_1(joined, self.act))
        return rows.unsqueeze(1)
