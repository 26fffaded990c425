"""Experts whose inputs, instead of their outputs, are multiplied by the router's weights, as in Llama 4."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.elementwise import sigmoid
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.ops import Pair


class InputScaledMLP(SparseMLP):
    """As `SparseMLP`, but that a token goes through the experts of its highest scores after it was multiplied by the
    sigmoid of each."""

    def mixture(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `Routed.mixture`."""
        scaled = (x.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)  # a row for each choice
        once = torch.ones(len(scaled), 1, dtype=x.dtype, device=x.device)
        return super().mixture(scaled, once, chosen.reshape(-1, 1)).view(*chosen.shape, -1).sum(1)

    def _routed(self, x: Tensor) -> Pair:
        scores, chosen = self.gate(x).topk(self._per_token, dim=-1)
        return sigmoid(scores.float()).to(x.dtype), chosen
