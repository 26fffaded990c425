"""Experts on rows narrower than the layer's, each with a norm on its output, as in Muse Spark."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.routers import GroupedRouter
from llm_service.layers.moe.sparse_mlp import Routed
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class ScaledInputNorm(nn.Module):
    """Scales by 1 + weight, and norms the result, in float32."""

    ops: RowOps = TORCH

    def __init__(self, size: int, eps: float, stored_as: str = "") -> None:
        super().__init__()
        self._eps = eps
        if stored_as:
            self.stored_as = stored_as
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._ones: Tensor
        self.register_buffer("_ones", torch.ones(size), persistent=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`: a checkpoint has the weight less 1."""
        return {f"{own}.weight": self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.weight, stored[:].float() + 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return self.ops.rms_norm((x * self.weight).to(x.dtype), self._ones, self._eps)


class LatentExperts(Routed):
    """Projects rows to the experts' width and back. A token's experts are chosen by the layer's rows."""

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.grouped is not None, "they are scored by sigmoids"
        self._group, self._multiplier = group, config.router_multiplier
        wide, narrow = slice(0, config.hidden_size), slice(0, config.pooled_size)
        count, eps = config.experts, config.norm_eps if config.out_eps is None else config.out_eps
        self.gate = GroupedRouter(count, config.experts_per_token, config.hidden_size, config.grouped)
        self.pool = PackedLinear(wide, {"pre_expert_proj": narrow}, bias=False, dtype=dtype)
        self.pooled_norm = RMSNorm.of(config, config.pooled_size, dtype, "pre_expert_norm")
        given = count, config.pooled_size, config.expert_size, group, dtype
        self.experts = Experts(*given, activation=config.activation, inputs_first=False)
        self.expert_norm = ScaledInputNorm(config.pooled_size, eps, "post_expert_norm")
        self.unpool = PackedLinear(narrow, {"post_expert_proj": wide}, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → the same."""
        weights, chosen = self.gate(x * self._multiplier)
        rows = self.pooled_norm(self.pool(x)).repeat_interleave(chosen.shape[1], 0)  # one for each choice
        once = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        each = self.mixture(rows, once, chosen.reshape(-1, 1))
        alone = (
            self._group.expert_parallel
        )  # an output is one rank's, of the others it is 0, and so is the norm of that
        each = self.expert_norm(each if alone else self._group.sum(each))
        sums = (each.view(*chosen.shape, -1) * weights.unsqueeze(2)).sum(1)
        out: Tensor = self.unpool(self._group.sum(sums) if alone else sums)
        return out
