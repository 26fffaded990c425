"""Attention whose heads are normed before their gates open them, as in Muse Spark."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBatch
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.self_attention import SelfAttention


class NormedOutputAttention(SelfAttention):
    """Attention, each head of which is normed, without a weight, before its gates open it."""

    def mix(self, inputs: tuple[Tensor, ...], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MixerPart`."""
        query, key, value, gates = inputs
        attended = batch.attend(query, key, value, cache)
        ones = torch.ones(self.head_dim, dtype=attended.dtype, device=attended.device)
        normed = self.ops.rms_norm(attended.view(-1, self.head_dim), ones, self.eps)
        return normed.view(attended.shape) * sigmoid(gates.flatten(1))
