"""Several streams between layers, the first of which a layer computes while the others follow (AltUp: Baykal et al.
2023), as in Gemma 3n."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.mixer import HandedOn, Rotary
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import Pair
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig

_LEAST = 1e-5
"""The least mean square of a stream."""


class AltUp(nn.Module):
    """Predicts streams before a layer computes one of them, and corrects them afterwards."""

    stored_as: ClassVar[str] = "altup"

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.alternating is not None, "a decoder with such streams"
        size, self._count, self._scaled = config.hidden_size, config.alternating.count, config.alternating.scaled
        self._share = 1.0 / size

        def few(name: str, inputs: int, outputs: int) -> PackedLinear:
            parts = {name: slice(0, outputs)}
            return PackedLinear(slice(0, inputs), parts, bias=False, dtype=dtype, rounds=False)

        self.router = few("modality_router", size, self._count)
        self.router_norm = RMSNorm.of(config, size, dtype)
        self.predictions = few("prediction_coefs", self._count, self._count**2)
        self.corrections = few("correction_coefs", self._count, self._count)
        self.correct_output_scale = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def predict(self, streams: Tensor) -> Tensor:
        """[n, count, hidden] → the same, each stream with as much of all as follows from the first."""
        weights = self.predictions(self._routed(streams[:, 0])).view(-1, self._count, self._count)
        return torch.baddbmm(streams, weights, streams)

    def correct(self, predicted: Tensor, made: Tensor) -> Tensor:
        """Predicted streams [n, count, hidden], and the layer's output for the first, [n, hidden] → streams, each with
        its share of the difference, which depends on the latter."""
        weights = self.corrections(self._routed(made)) + 1.0
        return torch.addcmul(predicted, weights.unsqueeze(2), (made - predicted[:, 0]).unsqueeze(1))

    def scaled(self, x: Tensor) -> Tensor:
        """The first stream [n, hidden], as a gate for per-layer inputs."""
        return x * self.correct_output_scale if self._scaled else x

    def _routed(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, count]."""
        out: Tensor = self.router(self.router_norm(x) * self._share)
        return out.float().tanh().to(x.dtype)


class Laurel(nn.Module):
    """x + norm(right(left(x))), by way of few numbers, as a residual (Menghani et al. 2024)."""

    stored_as: ClassVar[str] = "laurel"

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.alternating is not None, "a decoder with such residuals"
        whole, narrow = slice(0, config.hidden_size), slice(0, config.alternating.residual_rank)
        self.left = PackedLinear(whole, {"linear_left": narrow}, bias=False, dtype=dtype)
        self.right = PackedLinear(narrow, {"linear_right": whole}, bias=False, dtype=dtype)
        self.norm = RMSNorm.of(config, config.hidden_size, dtype, "post_laurel_norm")

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → the same."""
        out: Tensor = x + self.norm(self.right(self.left(x)))
        return out


class StreamsIn(nn.Module):
    """Makes streams of embeddings: these, and products of them that are as large."""

    stored_as: ClassVar[str] = ""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.alternating is not None, "a decoder with such streams"
        whole, self._count = slice(0, config.hidden_size), config.alternating.count
        parts = {f"altup_projections.{number}": whole for number in range(self._count - 1)}
        self.others = PackedLinear(whole, parts, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, count · hidden]."""
        others = self.others(x).view(len(x), self._count - 1, -1)
        return torch.cat([x.unsqueeze(1), _as_large(others, x)], dim=1).flatten(1)


class StreamsOut(nn.Module):
    """Makes one of streams, as large as the first, and norms it."""

    stored_as: ClassVar[str] = ""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.alternating is not None, "a decoder with such streams"
        whole, self._count = slice(0, config.hidden_size), config.alternating.count
        names = [f"altup_unembed_projections.{number}" for number in range(self._count - 1)]
        self.others = _Beside(PackedLinear(whole, {name: whole}, bias=False, dtype=dtype) for name in names)
        self.norm = RMSNorm.of(config, config.hidden_size, dtype)

    def after_adding(self, streams: Tensor, _: Tensor | None) -> Pair:
        """[n, count · hidden], like a norm behind all layers: nothing is added."""
        first, *behind = streams.chunk(self._count, dim=1)
        others = torch.stack([part(x) for part, x in zip(self.others, behind, strict=True)], dim=1)
        return streams, self.norm(torch.cat([first.unsqueeze(1), _as_large(others, first)], dim=1).mean(dim=1))


class _Beside(nn.ModuleList):
    """Parts whose names in a checkpoint are beside its own."""

    stored_as = ""


def _as_large(others: Tensor, first: Tensor) -> Tensor:
    """[n, m, hidden], each with the mean square of `first` [n, hidden]."""
    wanted = first.square().mean(dim=-1, keepdim=True).sqrt().unsqueeze(1)
    return others * wanted / others.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST).sqrt()


_HALF = 2**-0.5
"""The factor of the sum of two residuals."""


class AltUpLayer(DecoderLayer):
    """A layer with a second residual, of low rank, beside the mixer's output."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.altup, self.laurel = AltUp(config, dtype), Laurel(config, dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: Rotary,
        cache: Any,
        batch: Any,
        places: Tensor | None = None,
        *,
        given: Tensor | None = None,
        kept: HandedOn | None = None,
        beside: tuple[Any, Any] | None = None,  # noqa: ARG002 - it has no companion
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderLayer.forward` of streams [n, count · hidden]."""
        predicted, inputs = self.before(x, residual, rotary)
        mixed = self.mixed(inputs, cache, batch, kept)
        if places is not None:
            predicted, mixed = predicted[places], mixed[places]
            given = None if given is None else given[places]
        streams, _ = self.after(predicted, mixed)
        if self.end is not None:
            streams[:, 1:] += self.end.added(self.altup.scaled(streams[:, 0]), given).unsqueeze(1)
        return streams.flatten(1), None

    def before(self, x: Tensor, _: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [n, count · hidden] → their prediction, [n, count, hidden], and the mixer's input."""
        predicted = self.altup.predict(x.view(len(x), -1, self.hidden_size))
        return predicted, self.mixer.project(self.mixer_in_norm.after_adding(predicted[:, 0], None)[1], rotary)

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The prediction, [n, count, hidden], and this rank's part of the mixer's output → the streams, and nothing to
        add."""
        one = residual[:, 0]
        beside = self.laurel(self.mixer_in_norm.after_adding(one, None)[1])
        joined = self.mixer.join(mixed)
        if self.mixer_out_norm is not None:
            joined = self.mixer_out_norm(joined)
        total, normed = self.mlp_in_norm.after_adding((one + joined + beside) * _HALF, None)
        out = self.mlp(normed)
        made = total + (out if self.mlp_out_norm is None else self.mlp_out_norm(out))
        return self.altup.correct(residual, made), residual[:0]
