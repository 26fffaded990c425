"""The training forward of the model: the mathematics of Qwen3-VL, written for equal grids in a batch.

The parameter names are those of the reference checkpoint, so a state dict of `Net` is the file that is exported. It is
leaner than the reference class on a CPU: vision needs no padding, and logits are computed where an answer is, not
everywhere. This module knows nothing of scenes, tokens or optimisers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.shape import ModelShape, TextShape
from tools.demo_model.vision import Vision, apply_rotary, attend

HINTED = (1, 3)
"""The decoder layers that hints are given on: after the one, what is named is found; after the other, what to name."""


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head, eps=shape.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head)
        q = apply_rotary(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)
        k = apply_rotary(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        share = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = attend(q.to(v.dtype), k.to(v.dtype), v, mask)
        y: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return y


class MLP(nn.Module):
    """The gated MLP."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Text(nn.Module):
    """The decoder, from embedded tokens to normalised hidden states."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, eps=shape.epsilon)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [3, batch, length] to tables [batch, 1, length, head], the three axes interleaved."""
        half = self.shape.head // 2
        axis = torch.zeros(half, dtype=torch.long)
        for which in (1, 2):
            axis[which : self.shape.sections[which] * 3 : 3] = which
        frequency = self.shape.theta ** -(torch.arange(half).float() / half)
        angle = (positions[axis].permute(1, 2, 0) * frequency).repeat(1, 1, 2)[:, None]
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor, extra: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, length, width] to normalised hidden states, and [2, batch, length, width] after layers `HINTED`.

        extra [levels, batch, length, width] is added after the first layers, level by level; it is zero at text.
        """
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        hinted: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask)
            if index < len(extra):
                x = x + extra[index]
            if index in HINTED:
                hinted.append(x)
        return self.norm(x), torch.stack(hinted)


class Net(nn.Module):
    """The model under the reference's parameter names; the output head is the embedding table (tied)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.visual = Vision(shape.vision, shape.text.width)
        self.language_model = Text(shape.text)

    def see(self, patches: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """patches [segments, height * width, 1536]: rows [1 + levels, segments, ..., width], last hidden states."""
        rows, hidden = self.visual(patches, self.visual.positions(height, width), *self.visual.rotary(height, width))
        return rows, hidden

    def answer(
        self, ids: Tensor, places: Tensor, mask: Tensor, slots: Tensor, rows: Tensor | None, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [wanted, vocabulary] at the flat indices `wanted`; hidden states [2, batch * length, width] for hints.

        ids [batch, length]; places [3, batch, length]; mask [batch, 1, length, length], added to the scores;
        slots: flat indices of the picture tokens in row order.
        """
        text, levels = self.language_model, len(self.shape.vision.levels)
        x = text.embed_tokens(ids).flatten(0, 1)
        extra = x.new_zeros(levels, *x.shape)
        if rows is not None:
            flat = rows.flatten(1, -2).to(x.dtype)
            x = x.index_copy(0, slots, flat[0])
            extra = extra.index_copy(1, slots, flat[1:])
        elif torch.is_grad_enabled():
            extra.requires_grad_()  # so that a compiled graph meets the same kind of input with and without pictures
        hidden, hinted = text(x.view(*ids.shape, -1), extra.view(levels, *ids.shape, -1), *text.rotary(places), mask)
        return F.linear(hidden.flatten(0, 1)[wanted], text.embed_tokens.weight), hinted.flatten(1, 2)


def allowed(branch: Tensor) -> Tensor:
    """The attention mask [batch, 1, length, length] of rows whose tokens belong to `branch` [batch, length].

    A token sees what is before it in the prefix (branch 0) and in its own branch.
    """
    length = branch.shape[1]
    own = (branch[:, None, :] == branch[:, :, None]) | (branch[:, None, :] == 0)
    open_ = own & torch.ones(length, length, dtype=torch.bool, device=branch.device).tril()
    return torch.zeros(open_.shape, dtype=torch.bfloat16, device=branch.device).masked_fill_(~open_, -1e4)[:, None]


def initialise(net: Net, seed: int) -> None:
    """Matrices by their fan-in, the last one of each residual branch smaller; embeddings small."""
    generator = torch.Generator().manual_seed(seed)
    last = ("o_proj", "down_proj", "attn.proj", "mlp.linear_fc2")
    for name, parameter in net.named_parameters():
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif "embed" in name and parameter.ndim == 2:
                parameter.normal_(0, 0.05, generator=generator)
            elif parameter.ndim >= 2:
                scale = 0.2 if any(part in name for part in last) else 0.7
                parameter.normal_(0, scale * parameter[0].numel() ** -0.5, generator=generator)
