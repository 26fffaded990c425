"""Experts beside a layer's dense feed-forward part, as in Gemma 4."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.sparse_mlp import Routed
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import TORCH, Pair, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class NormedRouter(nn.Module):
    """Scores normed rows. An expert's weight is its share of the chosen experts' probabilities, times a number of its
    own."""

    ops: RowOps = TORCH

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self._per_token, self._eps = config.experts_per_token, config.norm_eps
        self.proj = Linear(config.hidden_size, config.experts, bias=False, dtype=dtype)
        self.scale = _Gain(config.hidden_size, dtype)
        self.per_expert_scale = nn.Parameter(torch.empty(config.experts, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Pair:
        """[n, hidden] → weights, and numbers of experts int64, [n, per_token] each."""
        scores = self.proj(self.ops.rms_norm(x, self.scale.weight, self._eps))
        weights, chosen = self.ops.route(scores, self._per_token)
        return weights * self.per_expert_scale[chosen], chosen


class _Gain(nn.Module):
    """The factor of a normed row before it is scored: the checkpoint's, divided by the square root of the width."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {own: self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.weight, stored[:].float() * len(self.weight) ** -0.5)


class DenseHybridExperts(Routed):
    """Adds experts' output to that of a layer's dense part; both are normed before, and the experts' after as well. In
    a checkpoint its parts are beside the dense one."""

    stored_as: ClassVar[str] = ""

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        sizes = config.experts, config.hidden_size, config.expert_size
        self.router = NormedRouter(config, dtype)
        self.experts = Experts(*sizes, group, dtype, activation=config.activation)
        norm = partial(RMSNorm.of, config, config.hidden_size, dtype)
        self.dense_norm, self.out_norm = norm("post_feedforward_layernorm_1"), norm("post_feedforward_layernorm_2")
        self.in_norm = norm("pre_feedforward_layernorm_2")

    def forward(self, x: Tensor, dense: Tensor) -> Tensor:
        """The input of the layer's feed-forward parts before any norm, and the dense one's output, [n, hidden] each →
        their sum, of the same shape."""
        weights, chosen = self.router(x)
        mixed = self._group.sum(self.mixture(self.in_norm(x), weights, chosen))
        out: Tensor = self.dense_norm(dense) + self.out_norm(mixed)
        return out
