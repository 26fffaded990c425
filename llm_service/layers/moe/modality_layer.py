"""A decoder layer whose feed-forward part is told which tokens are media."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.mixer import HandedOn, Rotary


class ModalityLayer(DecoderLayer):
    """A layer with experts by modality, without norms behind its parts."""

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
        kept: HandedOn | None = None,  # noqa: ARG002 - no layer shares another's
        beside: tuple[Any, Any] | None = None,  # noqa: ARG002 - it has no companion
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderLayer.forward`; `given` int [n] is 1 of tokens of media, and of the marks around them, else 0."""
        assert given is not None, "experts are chosen by modality"
        residual, inputs = self.before(x, residual, rotary)
        mixed = self.mixer.mix(inputs, cache, batch)
        if places is not None:
            residual, mixed, given = residual[places], mixed[places], given[places]
        return self.after(residual, mixed, given.bool())

    def after(self, residual: Tensor, mixed: Tensor, media: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.after`; `media` bool [n]."""
        residual, normed = self.mlp_in_norm.after_adding(residual, self.mixer.join(mixed))
        return self.mlp(normed, media), residual
