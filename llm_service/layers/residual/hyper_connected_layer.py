"""A decoder layer with hyper-connections: several streams go to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm_service.families.family import LayerKind
from llm_service.layers.embeddings.ngrams import Ngrams
from llm_service.layers.mixer import HandedOn, Rotary
from llm_service.layers.residual.hyper_connections import StreamMix, added
from llm_service.layers.residual.stream_layer import StreamLayer
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class HyperConnectedLayer(StreamLayer):
    """A layer that mixes streams instead of norming. With a `number`, its index among layers with n-grams, it first
    adds n-gram embeddings to them."""

    def __init__(
        self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype, number: int | None = None
    ) -> None:
        super().__init__(kind, config, group, dtype)
        self.ngrams = None if number is None else Ngrams(config, number, group, dtype)
        self.mixer_in = StreamMix(config, dtype, "attn_hyper_connection")
        self.mlp_in = StreamMix(config, dtype, "mlp_hyper_connection")

    @property
    def companion(self) -> Ngrams | None:
        """See `DecoderLayer.companion`."""
        return self.ngrams

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,  # noqa: ARG002 - there is none
        rotary: Rotary,
        cache: Any,
        batch: Any,
        places: Tensor | None = None,
        *,
        given: Tensor | None = None,
        kept: HandedOn | None = None,
        beside: tuple[Any, Any] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderLayer.forward` of streams [n, count · hidden]; `given` int [n] are the tokens."""
        if self.ngrams is not None:
            assert given is not None, "its n-grams are of tokens"
            assert beside is not None, "they have a state"
            x = x + self.ngrams(x, given, *beside)
        return super().forward(x, None, rotary, cache, batch, places, kept=kept)

    def before(self, x: Tensor, _: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [n, count · hidden] → how much of the mixer's output each gets, [n, count], and the mixer's input."""
        mixed, weights = self.mixer_in(x)
        return weights, self.mixer.project(mixed, rotary)

    def after(self, residual: Tensor, mixed: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Streams [n, count · hidden], this rank's part of the mixer's output, and how much of it each gets, [n, count]
        → the streams, and nothing to add."""
        assert weights is not None, "streams have weights"
        streams = added(residual, self.mixer.join(mixed), weights)
        one, weights = self.mlp_in(streams)
        return added(streams, self.mlp(one), weights), streams[:0]
