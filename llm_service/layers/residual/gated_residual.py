"""A decoder layer that adds the output of its parts by learned gates, as in Muse Spark."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.moe.latent_experts import ScaledInputNorm
from llm_service.layers.norms import PlainNorm
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig

_LEAST = 1e-3
"""The least square of a factor."""


class ResidualGate(nn.Module):
    """α · residual + β · more, elementwise, where β = σ(gate / temperature), and α² = σ(−gate / temperature) · (1 + β),
    in float32."""

    stored_as: ClassVar[str] = ""

    def __init__(self, size: int, temperature: float, name: str) -> None:
        super().__init__()
        self._temperature, self._name = temperature, name
        self.factors = nn.Parameter(torch.empty(2, size), requires_grad=False)

    def targets(self, _: str) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{self._name}.gate": self._place}

    def _place(self, stored: Stored) -> None:
        gate = stored[:].float() / self._temperature
        share = gate.sigmoid()
        fill(self.factors, torch.stack([((-gate).sigmoid() * (1.0 + share)).clamp(min=_LEAST).sqrt(), share]))

    def forward(self, residual: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """[n, size] each → the two terms of the sum, of the same shapes."""
        return (self.factors[0] * residual).to(residual.dtype), (self.factors[1] * more).to(more.dtype)


class GatedResidualLayer(DecoderLayer):
    """A layer with norms before and behind its parts; those behind have no weight, or the weight of a normed input."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        size, eps = config.hidden_size, config.norm_eps if config.out_eps is None else config.out_eps
        self.plain_out_norm = PlainNorm(size, eps, dtype)
        self.scaled_out_norm = ScaledInputNorm(size, eps, "post_feedforward_layernorm")
        self.mixer_gate = ResidualGate(size, config.gate_temperature, "post_attention_residual_gate")
        self.mlp_gate = ResidualGate(size, config.gate_temperature, "post_feedforward_residual_gate")

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.after`."""
        residual, joined = self.mixer_gate(residual, self.plain_out_norm(self.mixer.join(mixed)))
        residual, normed = self.mlp_in_norm.after_adding(residual, joined)
        residual, out = self.mlp_gate(residual, self.scaled_out_norm(self.mlp(normed)))
        return out, residual
