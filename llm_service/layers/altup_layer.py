"""A decoder layer that computes the first of several streams, and has the others follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm_service.families.family import LayerKind
from llm_service.layers.altup import AltUp, Laurel
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.group import TensorGroup
from llm_service.layers.mixer import HandedOn, Rotary
from llm_service.model_config.text import TextConfig

_HALF = 2**-0.5
"""What the sum of two residuals is multiplied by."""


class AltUpLayer(DecoderLayer):
    """One with a second residual, of a low rank, beside what its mixer gives."""

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
        """Streams [n, count · hidden] → what is predicted of them, [n, count, hidden], and what is mixed."""
        predicted = self.altup.predict(x.view(len(x), -1, self.hidden_size))
        return predicted, self.mixer.project(self.mixer_in_norm.after_adding(predicted[:, 0], None)[1], rotary)

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """What was predicted, [n, count, hidden], and this rank's part of what the mixer gives → the streams, and
        nothing to be added."""
        one = residual[:, 0]
        beside = self.laurel(self.mixer_in_norm.after_adding(one, None)[1])
        joined = self.mixer.join(mixed)
        if self.mixer_out_norm is not None:
            joined = self.mixer_out_norm(joined)
        total, normed = self.mlp_in_norm.after_adding((one + joined + beside) * _HALF, None)
        out = self.mlp(normed)
        made = total + (out if self.mlp_out_norm is None else self.mlp_out_norm(out))
        return self.altup.correct(residual, made), residual[:0]
