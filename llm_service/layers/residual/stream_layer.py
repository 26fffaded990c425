"""A decoder layer with several streams, however these are combined for its parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.mixer import HandedOn, Rotary


class StreamLayer(DecoderLayer):
    """Its `before` combines streams into the mixer's input, and its `after` distributes the output among them."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,  # noqa: ARG002 - there is none
        rotary: Rotary,
        cache: Any,
        batch: Any,
        places: Tensor | None = None,
        *,
        given: Tensor | None = None,  # noqa: ARG002 - no layer has inputs of its own
        kept: HandedOn | None = None,
        beside: tuple[Any, Any] | None = None,  # noqa: ARG002 - it has no companion
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderLayer.forward` of streams [n, count · hidden]."""
        weights, inputs = self.before(x, None, rotary)
        mixed = self.mixed(inputs, cache, batch, kept)
        if places is not None:
            x, mixed, weights = x[places], mixed[places], weights[places]
        return self.after(x, mixed, weights)[0], None

    def after(self, residual: Tensor, mixed: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Streams [n, count · hidden], this rank's part of the mixer's output, and the weights of `before` → the
        streams, and nothing to add."""
        raise NotImplementedError
