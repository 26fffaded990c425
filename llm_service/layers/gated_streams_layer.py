"""A decoder layer between which and the next there are several streams that gates open."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.families.family import LayerKind
from llm_service.layers.gated_hyper_connections import GatedStreams, grown
from llm_service.layers.group import TensorGroup
from llm_service.layers.layer_of_streams import LayerOfStreams
from llm_service.layers.mixer import Rotary
from llm_service.model_config.text import TextConfig


class GatedStreamsLayer(LayerOfStreams):
    """One whose parts are given what several streams make together, normed."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.mixer_in = GatedStreams(config, "attn_hc")
        self.mlp_in = GatedStreams(config, "ffn_hc")

    def before(self, x: Tensor, _: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [n, count · hidden] → how much of what comes out of the mixer each gets, float32 [n, count], and what
        is mixed."""
        one, weights = self.mixer_in(x)
        return weights, self.mixer.project(self.mixer_in_norm.after_adding(one, None)[1], rotary)

    def after(self, residual: Tensor, mixed: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Streams [n, count · hidden], this rank's part of what the mixer gives, and how much of it each gets, float32
        [n, count] → the streams, and nothing to be added."""
        assert weights is not None, "streams have weights"
        streams = grown(residual, self.mixer.join(mixed), weights)
        one, weights = self.mlp_in(streams)
        return grown(streams, self.mlp(self.mlp_in_norm.after_adding(one, None)[1]), weights), streams[:0]
