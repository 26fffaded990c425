"""Qwen2-Audio's tower (https://arxiv.org/abs/2407.10759): Whisper's encoder, with positions averaged in pairs, and a
projection. The reference pads every clip to 30 seconds and masks the padding; here a clip keeps its length. Parameters
have the published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cpu.linear import Linear
from common.media.item import Grid
from encoder_service.models import blocks
from encoder_service.models.attention import Segments
from encoder_service.models.tower import AttendingTower

_KERNEL = 3


class ClipAttention(nn.Module):
    """Attention inside of each clip, [N, width] → [N, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj = Linear(width, width)
        self.out_proj = Linear(width, width)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = (part(x).view(len(x), self.heads, -1) for part in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.out_proj(segments(q, k, v).flatten(1))
        return out


class ClipLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, inner: int, act: str) -> None:
        super().__init__()
        self.self_attn = ClipAttention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = Linear(width, inner)
        self.act = blocks.activation(act)
        self.fc2 = Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), segments)
        out: Tensor = x + self.fc2(self.fc1(self.final_layer_norm(x), self.act))
        return out


class Qwen2AudioTower(AttendingTower):
    """Log-mel frames [Σ (2 · positions + 1), bands] of a packed batch → rows [Σ positions / 2, 1, out]; a grid's width
    counts positions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        width, heads = config["d_model"], config["encoder_attention_heads"]
        super().__init__(width // heads)
        bands, inner, act = config["num_mel_bins"], config["encoder_ffn_dim"], config["activation_function"]
        self.conv1 = Linear(bands * _KERNEL, width)
        self.conv2 = Linear(width * _KERNEL, width)
        self.embed_positions = nn.Embedding.from_pretrained(torch.empty(config["max_source_positions"], width))
        self.layers = nn.ModuleList(ClipLayer(width, heads, inner, act) for _ in range(config["encoder_layers"]))
        self.layer_norm = nn.LayerNorm(width)
        self.linear = Linear(width, config["output_dim"])

    def forward(self, frames: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.run(frames, self.prepare(grids, frames.device))

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> tuple[list[int], Segments]:
        """The positions of each clip, and their bounds on the device."""
        positions = [grid.w for grid in grids]
        return positions, self.backend.over(positions, device)

    def run(self, frames: Tensor, ready: tuple[list[int], Segments]) -> Tensor:
        """Frames of the clips that were prepared → rows."""
        positions, segments = ready
        x = self._embed(frames.split([2 * count + 1 for count in positions]))
        for layer in self.layers:
            x = layer(x, segments)
        pairs = [clip[: len(clip) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for clip in x.split(positions)]
        rows: Tensor = self.linear(self.layer_norm(torch.cat(pairs)))
        return rows.unsqueeze(1)

    def _embed(self, clips: Sequence[Tensor]) -> Tensor:
        """Hidden states [Σ positions, width]: two convolutions over time, the second with stride 2, and position
        embeddings. A convolution is a product with each output's window, padded with zeros before the clip."""
        gelu = nn.GELU()
        seen = torch.cat([_windows(clip, 1) for clip in clips])
        first = self.conv1(seen, gelu).split([len(clip) - 1 for clip in clips])
        second: Tensor = self.conv2(torch.cat([_windows(each, 2) for each in first]), gelu)
        places = torch.cat([self.embed_positions.weight[: len(clip) // 2] for clip in clips])
        return second + places


def _windows(x: Tensor, step: int) -> Tensor:
    """Windows of three rows of [n, channels], the first one preceded by a row of zeros: [m, channels · 3]."""
    return F.pad(x, (0, 0, 1, 0)).unfold(0, _KERNEL, step).flatten(1)
