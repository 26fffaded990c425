"""A decoder layer between which and the next there are several streams in balance."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.families.family import LayerKind
from llm_service.layers.group import TensorGroup
from llm_service.layers.layer_of_streams import LayerOfStreams
from llm_service.layers.manifold_hyper_connections import StreamBalance, rebalanced
from llm_service.layers.mixer import Rotary
from llm_service.model_config.text import TextConfig


class ManifoldLayer(LayerOfStreams):
    """One whose parts are given what several streams make together, normed."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.mixer_in = StreamBalance(config, "attn_hc")
        self.mlp_in = StreamBalance(config, "ffn_hc")

    def before(self, x: Tensor, _: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Streams [n, count · hidden] → what `after` takes as weights, [n, count, 1 + count], and what is mixed."""
        one, out, mixing = self.mixer_in(x)
        normed = self.mixer_in_norm.after_adding(one, None)[1]
        return torch.cat([out.unsqueeze(2), mixing], dim=2), self.mixer.project(normed, rotary)

    def after(self, residual: Tensor, mixed: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Streams [n, count · hidden], this rank's part of what the mixer gives, and how much of it each gets and, in
        rows, of each goes into each, [n, count, 1 + count] → the streams, and nothing to be added."""
        assert weights is not None, "streams have weights"
        streams = rebalanced(residual, self.mixer.join(mixed), weights[:, :, 0], weights[:, :, 1:])
        one, out, mixing = self.mlp_in(streams)
        made = self.mlp(self.mlp_in_norm.after_adding(one, None)[1])
        return rebalanced(streams, made, out, mixing), streams[:0]
