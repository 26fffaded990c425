"""Attention whose queries grow with their places, so that it stays sharp in long contexts (Nakanishi 2025), as in
Llama 4's layers without rotary positions, and in Ministral 3."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.mixer import Rotary
from llm_service.layers.ops import MultimodalRotary
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.model_config.rotary import Tempering


class TemperedAttention(SelfAttention):
    """Self-attention that is given what `TemperedRotary` makes."""

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `SelfAttention.project`."""
        *angles, factors = rotary
        query, *others = super().project(x, tuple(angles))
        return (query * factors).to(query.dtype), *others


class TemperedRotary(MultimodalRotary):
    """Tables of angles, and of what queries are multiplied by."""

    tempering: Tempering

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """int [3, n] → as `MultimodalRotary.tables`, and float32 [n, 1, 1]."""
        factors: Tensor = self.tempering.factors(positions[0]).view(-1, 1, 1)
        return *super().tables(positions, dtype), factors
