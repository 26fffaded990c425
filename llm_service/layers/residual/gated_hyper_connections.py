"""Several streams between layers, each with gates for how much of it goes into a part of a layer, and how much of the
part's output is added to it, as in Hunyuan V4 (hyper-connections, Zhu et al. 2024, without mixing among streams)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.mixer import Rotary
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import Pair
from llm_service.layers.residual.stream_layer import StreamLayer
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class StreamGates(nn.Module):
    """Gates computed from all streams together, in float32: σ(scale · weight · their norm + base), each `kind` of
    gates, one for every stream, with its own scale. `before` is the prefix of its tensors' names."""

    def __init__(self, config: TextConfig, kinds: int, stored_as: str, before: str = "") -> None:
        super().__init__()
        assert config.opened is not None, "a decoder with such streams"
        self.stored_as, self._before = stored_as, before
        self._count, self._eps, self._kinds = config.opened.count, config.norm_eps, kinds
        gates = kinds * self._count

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=torch.float32), requires_grad=False)

        self.weight, self.base, self.scale = empty(gates, self._count * config.hidden_size), empty(gates), empty(kinds)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        name = f"{own}.{self._before}"
        return {f"{name}fn": self._place, f"{name}base": self._place_base, f"{name}scale": self._place_scale}

    def _place(self, stored: Stored) -> None:
        fill(self.weight, stored[:])

    def _place_base(self, stored: Stored) -> None:
        fill(self.base, stored[:])

    def _place_scale(self, stored: Stored) -> None:
        fill(self.scale, stored[:])

    def forward(self, every: Tensor) -> tuple[Tensor, ...]:
        """Streams float32 [n, count · hidden] → of each kind float32 [n, count]."""
        normed = every * torch.rsqrt(every.square().mean(-1, keepdim=True) + self._eps)
        made = nn.functional.linear(normed, self.weight)
        opened: Tensor = sigmoid(made * self.scale.repeat_interleave(self._count) + self.base)
        return tuple(opened.split(self._count, dim=1))


class GatedStreams(nn.Module):
    """Combines streams into the input of a part, and computes how much of its output each gets."""

    stored_as: ClassVar[str] = ""

    def __init__(self, config: TextConfig, stored_as: str) -> None:
        super().__init__()
        assert config.opened is not None, "a decoder with such streams"
        self._shape, self.gates = config.opened, StreamGates(config, 2, stored_as)

    def forward(self, streams: Tensor) -> Pair:
        """[n, count · hidden] → [n, hidden] of the same type, and weights, float32 [n, count]."""
        every, eps = streams.float(), self._shape.eps
        into, out = self.gates(every)
        return _joined(every, into + eps).to(streams.dtype), self._shape.magnitude * out + eps


class JoinedStreams(nn.Module):
    """Behind all layers: combines the streams, and norms the result."""

    stored_as: ClassVar[str] = ""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.opened is not None, "a decoder with such streams"
        self._eps, self.gates = config.opened.eps, StreamGates(config, 1, "hc_head", "hc_")
        self.norm = RMSNorm.of(config, config.hidden_size, dtype)

    def after_adding(self, streams: Tensor, _: Tensor | None) -> Pair:
        """[n, count · hidden] → the same, and [n, hidden]; nothing is added."""
        every = streams.float()
        (into,) = self.gates(every)
        return streams, self.norm(_joined(every, into + self._eps).to(streams.dtype))


def _joined(streams: Tensor, weights: Tensor) -> Tensor:
    """float32 [n, count · hidden] and [n, count] → [n, hidden]."""
    made: Tensor = (weights.unsqueeze(2) * streams.unflatten(1, (weights.shape[1], -1))).sum(1)
    return made


def grown(streams: Tensor, made: Tensor, weights: Tensor) -> Tensor:
    """[n, count · hidden], plus, in float32, the output [n, hidden] weighted by [n, count]."""
    more: Tensor = weights.unsqueeze(2) * made.float().unsqueeze(1)
    return (streams.float() + more.flatten(1)).to(streams.dtype)


class GatedStreamsLayer(StreamLayer):
    """A layer whose parts get the normed combination of several streams."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.mixer_in = GatedStreams(config, "attn_hc")
        self.mlp_in = GatedStreams(config, "ffn_hc")

    def before(self, x: Tensor, _: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [n, count · hidden] → how much of the mixer's output each gets, float32 [n, count], and the mixer's
        input."""
        one, weights = self.mixer_in(x)
        return weights, self.mixer.project(self.mixer_in_norm.after_adding(one, None)[1], rotary)

    def after(self, residual: Tensor, mixed: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Streams [n, count · hidden], this rank's part of the mixer's output, and how much of it each gets, float32
        [n, count] → the streams, and nothing to add."""
        assert weights is not None, "streams have weights"
        streams = grown(residual, self.mixer.join(mixed), weights)
        one, weights = self.mlp_in(streams)
        return grown(streams, self.mlp(self.mlp_in_norm.after_adding(one, None)[1]), weights), streams[:0]
