"""Routers: which experts a token uses, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.elementwise import sigmoid
from llm_service.layers.ops import Pair
from llm_service.model_config.experts import GroupedExperts


class GroupedRouter(nn.Module):
    """Scores each expert by a sigmoid, as DeepSeek-V3 does. Experts are chosen by scores plus a correction for each,
    within the groups with the highest sums of their two best scores; their weights are the scores alone. Or scores are
    probabilities over all experts, without corrections. In float32, whatever the type of other weights."""

    def __init__(self, experts: int, per_token: int, hidden: int, grouped: GroupedExperts) -> None:
        super().__init__()
        self._per_token, self._grouped = per_token, grouped
        self.weight = nn.Parameter(torch.empty(experts, hidden), requires_grad=False)
        if not grouped.probabilities:
            self.e_score_correction_bias = nn.Parameter(torch.empty(experts), requires_grad=False)

    def forward(self, x: Tensor) -> Pair:
        """[n, hidden] → weights, of the same type, and numbers of experts int64, [n, per_token] each."""
        products = functional.linear(x.float(), self.weight)
        if self._grouped.probabilities:
            scores = corrected = products.softmax(-1)
        else:
            scores = sigmoid(products)
            corrected = scores + self.e_score_correction_bias
        if self._grouped.kept < self._grouped.groups:
            apart = corrected.view(len(x), self._grouped.groups, -1)
            kept = apart.topk(2, dim=-1).values.sum(-1).topk(self._grouped.kept, dim=-1).indices
            out = torch.ones_like(apart[:, :, 0], dtype=torch.bool).scatter_(1, kept, value=False)
            corrected = apart.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = corrected.topk(self._per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        return (weights * (self._grouped.scale / (weights.sum(-1, keepdim=True) + _LEAST))).to(x.dtype), chosen


class ProbabilityRouter(nn.Module):
    """Chooses the likeliest experts by their probabilities among all, which are their weights as well, times `scale`:
    they do not sum to 1. In float32, whatever the type of other weights."""

    def __init__(self, experts: int, per_token: int, hidden: int, scale: float) -> None:
        super().__init__()
        self._per_token, self._scale = per_token, scale
        self.weight = nn.Parameter(torch.empty(experts, hidden), requires_grad=False)

    def forward(self, x: Tensor) -> Pair:
        """See `GroupedRouter`."""
        weights, chosen = functional.linear(x.float(), self.weight).softmax(-1).topk(self._per_token, dim=-1)
        return (weights * self._scale).to(x.dtype), chosen


_LEAST = 1e-20
"""Added to divisors."""
