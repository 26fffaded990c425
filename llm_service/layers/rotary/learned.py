"""Mistral Large 4's learned rotary frequencies, and its learned growth of queries with positions, for each head."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.mixer import Rotary
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.model_config.rotary import RotaryConfig


class LearnedRotary(MultimodalRotary):
    """Tables of angles with frequencies multiplied by e^α, and logarithms of positions for the growth of queries."""

    stored_as: ClassVar[str] = "rotary_emb"
    _stated: Tensor

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device) -> Self:
        """See `MultimodalRotary.of`."""
        made = super().of(config, device)
        made.register_buffer("_stated", made._frequencies.clone(), persistent=False)
        return made

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`: α, [dim / 2]."""
        return {f"{own}.alpha": self._place}

    def _place(self, stored: Stored) -> None:
        factors = stored[:].to(self._stated)
        fill(self._frequencies, self._stated * factors.exp())

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """int [3, n] → as `MultimodalRotary.tables`, and ln(1 + place), float32 [n, 1, 1]."""
        return *super().tables(positions, dtype), positions[0].float().log1p().view(-1, 1, 1)


class LearnedGrowth(nn.Module):
    """Multiplies queries of each head of a layer by scale · ln(1 + position) + bias."""

    stored_as: ClassVar[str] = "softmax_scaling"

    def __init__(self, heads: slice) -> None:
        super().__init__()
        self._own, count = heads, heads.stop - heads.start
        self.scale, self.bias = (nn.Parameter(torch.empty(count), requires_grad=False) for _ in range(2))

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.scale": self._place_scale, f"{own}.bias": self._place_bias}

    def _place_scale(self, stored: Stored) -> None:
        fill(self.scale, stored[self._own].float())

    def _place_bias(self, stored: Stored) -> None:
        fill(self.bias, stored[self._own].float())

    def forward(self, query: Tensor, logarithms: Tensor) -> Tensor:
        """query [n, heads, width], logarithms float32 [n, 1, 1] → the same as the query."""
        factors = logarithms * self.scale.unsqueeze(1) + self.bias.unsqueeze(1)
        return (query * factors).to(query.dtype)
