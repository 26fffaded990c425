"""A mixture of experts as a layer's feed-forward part: a router, its experts, and shared experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear
from llm_service.families.gates import Gates
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.mlp import MLP, SquaredMLP
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.routers import GroupedRouter, ProbabilityRouter
from llm_service.layers.ops import TORCH, Pair, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.experts import GroupedExperts
from llm_service.model_config.feed_forward import Activation


class Routed(nn.Module):
    """Has `experts` compute the rows that go through each."""

    ops: RowOps = TORCH
    experts: Experts

    def mixture(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [n, hidden], weights and numbers of experts [n, per_token] each → this rank's part of their weighted sums,
        [n, hidden]."""
        return (self._together if x.device.type == "cuda" else self._in_turn)(x, weights, chosen)

    def _in_turn(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """One chosen expert after the other, each with all of its tokens: for CPUs, where few are read."""
        out, own = torch.zeros_like(x), self.experts.own
        for expert in chosen.unique().tolist():
            if not own.start <= expert < own.stop:
                continue
            token, place = torch.where(chosen == expert)
            out.index_add_(0, token, self.experts.run(expert, x[token]) * weights[token, place].unsqueeze(1))
        return out

    def _together(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts in one product over rows sorted by expert. Sums are in the order of the choice, so they are
        reproducible. The number of rows does not depend on which ranks they belong to, so that this can be captured."""
        routes = self.ops.sort_by_expert(chosen, self.experts.count, self.experts.own)
        out = self.experts.run_grouped(x[routes.rows], routes.ends)
        return self.ops.weighted_sum(out, routes.places, weights)


class SparseMLP(Routed):
    """Routes each token to the `per_token` likeliest experts and sums their outputs by their normalised weights, or,
    with a `scale`, by the weights times that. A shared expert, of size `shared_inner`, gets every token, with weight 1
    or that of a `shared_gate`. With `latent`, routed experts work on so many numbers, projected from a token and back.
    `has_gates` applies to all."""

    def __init__(
        self,
        experts: int,
        per_token: int,
        hidden: int,
        inner: int,
        group: TensorGroup,
        dtype: torch.dtype,
        *,
        shared_inner: int = 0,
        shared_gate: bool = True,
        grouped: GroupedExperts | None = None,
        scale: float | None = None,
        activation: Activation | Gates = Activation.SILU,
        shared_activation: Activation | Gates | None = None,
        fused: bool = False,
        inputs_first: bool = False,
        has_gates: bool = True,
        latent: int = 0,
    ) -> None:
        """The shared expert has the others' activation unless it is given its own; with `fused` a checkpoint has its
        gate and up projections in one matrix. `inputs_first` is as in `Experts`."""
        super().__init__()
        self._group, self._per_token = group, per_token
        self.gate: Linear | GroupedRouter | ProbabilityRouter
        if grouped is not None:
            self.gate = GroupedRouter(experts, per_token, hidden, grouped)
        elif scale is not None:
            self.gate = ProbabilityRouter(experts, per_token, hidden, scale)
        else:
            self.gate = Linear(hidden, experts, bias=False, dtype=dtype)
        sizes = experts, latent or hidden, inner
        self.experts = Experts(
            *sizes, group, dtype, activation=activation, inputs_first=inputs_first, has_gates=has_gates
        )
        self.latent_in = self.latent_out = None
        if latent:
            whole, less = slice(0, hidden), slice(0, latent)
            self.latent_in = PackedLinear(whole, {"fc1_latent_proj": less}, bias=False, dtype=dtype)
            self.latent_out = PackedLinear(less, {"fc2_latent_proj": whole}, bias=False, dtype=dtype)
        self.shared_expert: MLP | SquaredMLP | None = None
        name, given = "" if shared_gate else "shared_experts", (hidden, shared_inner, group, dtype)
        if shared_inner and has_gates:
            own = activation if shared_activation is None else shared_activation
            self.shared_expert = MLP(*given, activation=own, fused=fused, stored_as=name)
        elif shared_inner:
            self.shared_expert = SquaredMLP(*given, stored_as=name)
        has_gate = shared_inner > 0 and shared_gate
        self.shared_expert_gate = Linear(hidden, 1, bias=False, dtype=dtype) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]."""
        weights, chosen = self._routed(x)
        out = self.mixture(x if self.latent_in is None else self.latent_in(x), weights, chosen)
        if self.latent_out is not None:
            out = self.latent_out(out)
        if self.shared_expert is not None:
            shared = self.shared_expert.run(x)
            out = out + (shared if self.shared_expert_gate is None else sigmoid(self.shared_expert_gate(x)) * shared)
        return self._group.sum(out)

    def _routed(self, x: Tensor) -> Pair:
        made = self.gate(x)
        return self.ops.route(made, self._per_token) if isinstance(self.gate, Linear) else made
