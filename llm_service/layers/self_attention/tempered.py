"""Attention whose queries grow with their positions, so that it stays sharp in long contexts (Nakanishi 2025), as in
Llama 4's layers without rotary positions, and in Ministral 3."""

from __future__ import annotations

from torch import Tensor

from llm_service.layers.mixer import Rotary
from llm_service.layers.self_attention.layer import SelfAttention


class TemperedAttention(SelfAttention):
    """Self-attention with the tables of `TemperedRotary`."""

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `SelfAttention.project`."""
        *angles, factors = rotary
        query, *others = super().project(x, tuple(angles))
        return (query * factors).to(query.dtype), *others
