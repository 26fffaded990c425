"""Several streams between layers: how they are mixed into the input of a layer's part, and how much of its output is
added to each (hyper-connections: Zhu et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.elementwise import sigmoid, silu
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import Pair
from llm_service.model_config.text import TextConfig


class StreamNorm(RMSNorm):
    """Norms each of `count` streams by itself; every number of every stream has a weight of its own."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        assert config.streams is not None, "a decoder with streams"
        self.count = config.streams.count
        size, zero_centred = self.count * config.hidden_size, config.family.norms.zero_centred
        super().__init__(size, config.norm_eps, dtype, zero_centred=zero_centred)

    def forward(self, x: Tensor) -> Tensor:
        """[n, count · hidden] → the same."""
        apart = x.float().unflatten(1, (self.count, -1))
        normed = functional.rms_norm(apart, apart.shape[-1:], None, self.eps).flatten(1)
        return (normed * self.weight).to(x.dtype)


class StreamMix(nn.Module):
    """Mixes streams into one, elementwise, by weights computed from all of them. With `injects` it also computes how
    much of the output is added to each. `stored_as` is its name in a checkpoint."""

    def __init__(self, config: TextConfig, dtype: torch.dtype, stored_as: str, *, injects: bool = True) -> None:
        super().__init__()
        assert config.streams is not None, "a decoder with streams"
        self.stored_as, self._count = stored_as, config.streams.count
        whole, narrow = slice(0, self._count * config.hidden_size), slice(0, config.streams.rank)
        self.hc_norm = StreamNorm(config, dtype)
        self.down = PackedLinear(whole, {"input_mix_weight_down": narrow}, bias=False, dtype=dtype)
        self.up = PackedLinear(narrow, {"input_mix_weight_up": whole}, bias=False, dtype=dtype)
        self.inject: PackedLinear | None = None
        if injects:  # few
            streams = {"block_inject_weight": slice(0, self._count)}
            self.inject = PackedLinear(whole, streams, bias=False, dtype=dtype, rounds=False)

    def forward(self, streams: Tensor) -> Pair:
        """[n, count · hidden] → [n, hidden], and how much of the output each stream gets, [n, count]; empty without
        `injects`."""
        normed = self.hc_norm(streams)
        weights = sigmoid(self.up(silu(self.down(normed) / self._count)))
        mixed = (weights * normed).unflatten(1, (self._count, -1)).mean(dim=1)
        if self.inject is None:
            return mixed, mixed[:, :0]
        return mixed, 2 * sigmoid(self.inject(normed) / self._count)

    def after_adding(self, streams: Tensor, _: Tensor | None) -> Pair:
        """Like a norm behind all layers: nothing is added."""
        return streams, self(streams)[0]


def added(streams: Tensor, made: Tensor, weights: Tensor) -> Tensor:
    """[n, count · hidden] plus the output [n, hidden] weighted by [n, count]."""
    return streams + (made.unsqueeze(1) * weights.unsqueeze(2)).flatten(1)
