"""A decoder layer: pre-norm, a mixer and a gated feed-forward part, dense or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llm_service.families.family import FeedForwardKind, LayerKind, Mixer
from llm_service.layers.experts import SparseMLP
from llm_service.layers.gated_delta_net import GatedDeltaNet
from llm_service.layers.group import TensorGroup
from llm_service.layers.mixer import MixerPart, Rotary
from llm_service.layers.mlp import MLP
from llm_service.layers.ops import RMSNorm
from llm_service.layers.self_attention import SelfAttention
from llm_service.layers.short_convolution import ShortConvolution
from llm_service.models.config import TextConfig


def _dense(config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> MLP:
    given = config.hidden_size, config.intermediate_size, group, dtype
    return MLP(*given, activation=config.activation, fused=config.family.fused_gates)


def _experts(config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> SparseMLP:
    return SparseMLP(
        config.experts,
        config.experts_per_token,
        config.hidden_size,
        config.expert_size,
        group,
        dtype,
        shared_inner=config.shared_expert_size,
        grouped=config.grouped,
    )


MIXERS: dict[Mixer, Callable[[LayerKind, TextConfig, TensorGroup, torch.dtype], MixerPart]] = {
    Mixer.ATTENTION: SelfAttention,
    Mixer.GATED_DELTA_NET: lambda _, *given: GatedDeltaNet(*given),
    Mixer.SHORT_CONVOLUTION: lambda _, *given: ShortConvolution(*given),
}
FEED_FORWARDS: dict[FeedForwardKind, Callable[[TextConfig, TensorGroup, torch.dtype], nn.Module]] = {
    FeedForwardKind.DENSE: _dense,
    FeedForwardKind.EXPERTS: _experts,
}


class DecoderLayer(nn.Module):
    """One decoder layer, made of what its kind says. What its mixer and its feed-forward part give is normed before it
    is added where the family has norms for that."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            zero_centred = config.family.zero_centred_norms
            return RMSNorm(config.hidden_size, config.norm_eps, dtype, zero_centred=zero_centred, stored_as=name)

        names = config.family.norms
        self.mixer_in_norm = norm(names.mixer_in)
        self.mixer = MIXERS[kind.mixer](kind, config, group, dtype)
        self.mixer_out_norm = norm(names.mixer_out) if names.mixer_out else None
        self.mlp_in_norm = norm(names.feed_forward_in)
        self.mlp = FEED_FORWARDS[kind.feed_forward](config, group, dtype)
        self.mlp_out_norm = norm(names.feed_forward_out) if names.feed_forward_out else None
        self.windowed = kind.window > 0
        self.ranks = group.size

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: Rotary,
        cache: Any,
        batch: Any,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[n, hidden], and what is to be added to it, if there is anything → the same, not added either, so that the
        next norm does both at once. With `places` int64 [m], what follows the mixer is computed for those alone.
        `cache` and `batch` are what the mixer takes."""
        residual, inputs = self.before(x, residual, rotary)
        mixed = self.mixer.mix(inputs, cache, batch)
        if places is not None:
            residual, mixed = residual[places], mixed[places]
        return self.after(residual, mixed)

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[n, hidden] each → their sum, and what is mixed."""
        residual, normed = self.mixer_in_norm.after_adding(x, residual)
        return residual, self.mixer.project(normed, rotary)

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden], and this rank's part of what the mixer gives → [n, hidden] twice, to be added."""
        joined = self.mixer.join(mixed)
        if self.mixer_out_norm is not None:
            joined = self.mixer_out_norm(joined)
        residual, normed = self.mlp_in_norm.after_adding(residual, joined)
        out = self.mlp(normed)
        return out if self.mlp_out_norm is None else self.mlp_out_norm(out), residual
