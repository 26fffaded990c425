"""Several streams between layers that are also mixed among each other, by matrices whose rows and columns sum to 1, so
that none grows (manifold-constrained hyper-connections, mHC: Xie et al. 2025, https://arxiv.org/abs/2512.24880)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.mixer import Rotary
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import Pair
from llm_service.layers.residual.stream_layer import StreamLayer
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class StreamBalance(nn.Module):
    """Computes three kinds of weights from several streams together, in float32: to combine them into the input of a
    part, to add its output to each, and to mix them among each other. `stored_as` is its name in a checkpoint."""

    def __init__(self, config: TextConfig, stored_as: str) -> None:
        super().__init__()
        assert config.balanced is not None, "a decoder with such streams"
        self.stored_as, self._shape, self._eps = stored_as, config.balanced, config.norm_eps
        count = config.balanced.count

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=torch.float32), requires_grad=False)

        weights = (2 + count) * count
        self.fn, self.base, self.scale = empty(weights, count * config.hidden_size), empty(weights), empty(3)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, count · hidden] → their combination, [n, hidden]; how much of the output each gets, [n, count]; and how
        much of each (first index) goes into each, [n, count, count]; of the same type."""
        count, eps, dtype = self._shape.count, self._shape.eps, streams.dtype
        every = streams.float()
        normed = every * torch.rsqrt(every.square().mean(-1, keepdim=True) + self._eps)
        made = nn.functional.linear(normed, self.fn)
        parts = zip(made.split(self._sizes, dim=1), self.base.split(self._sizes), self.scale, strict=True)
        into, out, across = (weights * scale + base for weights, base, scale in parts)
        one = ((sigmoid(into) + eps).unsqueeze(2) * every.unflatten(1, (count, -1))).sum(1)
        mixing = balanced(across.unflatten(1, (count, count)), eps, self._shape.rounds)
        return one.to(dtype), (2 * sigmoid(out)).to(dtype), mixing.to(dtype)

    @property
    def _sizes(self) -> list[int]:
        count = self._shape.count
        return [count, count, count * count]


def balanced(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """Matrices [n, count, count] whose columns, and nearly rows, sum to 1 (Sinkhorn and Knopp 1967): the softmax of
    each row, and then columns and rows in turns divided by their sums, columns so many times."""
    found: Tensor = logits.softmax(-1) + eps
    for number in range(rounds):
        if number:
            found = found / (found.sum(-1, keepdim=True) + eps)
        found = found / (found.sum(-2, keepdim=True) + eps)
    return found


def rebalanced(streams: Tensor, made: Tensor, weights: Tensor, mixing: Tensor) -> Tensor:
    """Streams [n, count · hidden] mixed among each other by [n, count, count], plus the output [n, hidden] weighted by
    [n, count]."""
    apart = streams.unflatten(1, (mixing.shape[1], -1))
    mixed: Tensor = weights.unsqueeze(2) * made.unsqueeze(1) + mixing.transpose(1, 2) @ apart
    return mixed.flatten(1)


class MeanNorm(RMSNorm):
    """Behind all layers: norms the mean of so many streams."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__(config.hidden_size, config.norm_eps, dtype)
        assert config.balanced is not None, "a decoder with such streams"
        self._count = config.balanced.count

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """Streams [n, count · hidden] → the same, and [n, hidden]; nothing is added."""
        assert more is None, "streams have it already"
        return x, self(x.unflatten(1, (self._count, -1)).mean(1))


class ManifoldLayer(StreamLayer):
    """A layer whose parts get the normed combination of several streams."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.mixer_in = StreamBalance(config, "attn_hc")
        self.mlp_in = StreamBalance(config, "ffn_hc")

    def before(self, x: Tensor, _: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [n, count · hidden] → the weights of `after`, [n, count, 1 + count], and the mixer's input."""
        one, out, mixing = self.mixer_in(x)
        normed = self.mixer_in_norm.after_adding(one, None)[1]
        return torch.cat([out.unsqueeze(2), mixing], dim=2), self.mixer.project(normed, rotary)

    def after(self, residual: Tensor, mixed: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Streams [n, count · hidden], this rank's part of the mixer's output, and the weights [n, count, 1 + count]:
        how much of it each gets, followed by the mixing matrix → the streams, and nothing to add."""
        assert weights is not None, "streams have weights"
        streams = rebalanced(residual, self.mixer.join(mixed), weights[:, :, 0], weights[:, :, 1:])
        one, out, mixing = self.mlp_in(streams)
        made = self.mlp(self.mlp_in_norm.after_adding(one, None)[1])
        return rebalanced(streams, made, out, mixing), streams[:0]
