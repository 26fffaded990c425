"""Kimi Delta Attention against transformers' operators, by the checks of gated delta nets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from testkit import reference as _reference  # isort: skip  # noqa: F401 - before transformers
from transformers.models.glm5_next import modeling_glm5_next as theirs  # isort: skip

from llm_service.layers.cache_spec import StateCache
from llm_service.layers.kda.backend import KdaInput, KdaShape, KdaWeights
from testkit import gdn_cases
from testkit.gdn_cases import State, unwritten

_EPS = 1e-5


@dataclass(slots=True)
class Case:
    """Weights, and tokens of some sequences one after the other."""

    shape: KdaShape
    weights: KdaWeights
    given: KdaInput
    near: Mapping[torch.dtype, float] = field(default_factory=lambda: gdn_cases.NEAR)

    @classmethod
    def drawn(
        cls, shape: KdaShape, tokens: int, dtype: torch.dtype, least: float | None = -5.0, device: str = "cpu"
    ) -> Case:
        random = torch.Generator().manual_seed(tokens)

        def normal(*size: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (scale * torch.randn(size, generator=random)).to(device, dtype)

        long = torch.float32
        weights = KdaWeights(
            conv=normal(shape.channels, shape.width, scale=0.5, dtype=long),
            a_log=normal(shape.heads, dtype=long),
            dt_bias=normal(shape.values, dtype=long),
            gain=1 + normal(shape.head_dim, scale=0.1, dtype=long),
            eps=_EPS,
            least=least,
        )
        # Parts of wider products, as packed layers give them.
        qkv, z = normal(tokens, shape.channels + shape.values).split([shape.channels, shape.values], dim=1)
        return cls(shape, weights, KdaInput(qkv, z, normal(tokens, shape.values), normal(tokens, shape.heads)))

    def alike(self) -> None:
        """Makes all tokens the same, and nothing fade."""
        self.given.qkv.copy_(self.given.qkv[:1].expand_as(self.given.qkv))
        self.given.b.fill_(9.0)
        self.given.a.fill_(-60.0)
        self.weights.a_log.zero_()

    def part(self, begin: int, end: int) -> KdaInput:
        given = self.given
        return KdaInput(given.qkv[begin:end], given.z[begin:end], given.a[begin:end], given.b[begin:end])

    def states(self, slots: int) -> StateCache:
        return unwritten(self.shape.state(self.given.qkv.dtype), slots, self.given.qkv.device)

    def by_transformers(self, part: KdaInput, state: State | None) -> tuple[Tensor, State]:
        """What Glm5NextTextLinearAttention does between its projections, for one sequence."""
        shape, weights, count, qkv = self.shape, self.weights, len(part.qkv), part.qkv
        if state is None:
            before = qkv.new_zeros(shape.channels, shape.width - 1)
            state = before, qkv.new_zeros(shape.heads, shape.head_dim, shape.head_dim, dtype=torch.float32)
        convolution = state[0].clone()
        mixed = theirs.causal_conv1d_update(qkv.t()[None], convolution[None], weights.conv, activation="silu")
        heads = (each.view(1, count, shape.heads, -1) for each in mixed[0].t().split([shape.values] * 3, dim=1))
        rule = theirs.recurrent_kimi_delta_attention if count == 1 else theirs.chunk_kimi_delta_attention
        read, recurrent = rule(
            *heads,
            g=self._fading(part.a)[None],
            beta=part.b.sigmoid()[None],
            initial_state=state[1][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        norm = theirs.Glm5NextTextRMSNormGated(shape.head_dim, eps=weights.eps)
        norm.weight.data = weights.gain
        out = norm(read, part.z.view(1, count, shape.heads, -1))
        return out.reshape(count, -1), (convolution, recurrent[0])

    def exact(self) -> Tensor:
        """All tokens as one sequence, one after the other in float64."""
        shape, weights = self.shape, self.weights
        given = KdaInput(*(each.double() for each in (self.given.qkv, self.given.z, self.given.a, self.given.b)))
        conv, gain, rate = weights.conv.double(), weights.gain.double(), weights.a_log.double().exp().unsqueeze(1)
        behind = torch.nn.functional.pad(given.qkv.t(), (shape.width - 1, 0))[None]
        mixed = torch.nn.functional.conv1d(behind, conv.unsqueeze(1), groups=shape.channels)[0].t()
        query, key, value = torch.nn.functional.silu(mixed).unflatten(1, (3, shape.heads, -1)).unbind(1)
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        moved = (given.a + weights.dt_bias.double()).unflatten(1, (shape.heads, -1))
        g = -rate * torch.nn.functional.softplus(moved)
        if weights.least is not None:
            g = weights.least * (rate * moved).sigmoid()
        state, found = key.new_zeros(shape.heads, shape.head_dim, shape.head_dim), list[Tensor]()
        for at, beta in enumerate(given.b.sigmoid()):
            state = state * g[at].exp().unsqueeze(-1)
            change = beta.unsqueeze(-1) * (value[at] - (state * key[at].unsqueeze(-1)).sum(-2))
            state = state + key[at].unsqueeze(-1) * change.unsqueeze(-2)
            found.append((state * query[at].unsqueeze(-1)).sum(-2) * shape.head_dim**-0.5)
        normed = torch.nn.functional.rms_norm(torch.stack(found), gain.shape, gain, weights.eps)
        return (normed * given.z.sigmoid().view_as(normed)).flatten(1)

    def _fading(self, a: Tensor) -> Tensor:
        gate = object.__new__(theirs.Glm5NextTextForgetGate)
        torch.nn.Module.__init__(gate)
        gate.head_dim, gate.num_heads = self.shape.head_dim, self.shape.heads
        passed: Any = torch.nn.Identity()
        gate.f_a_proj = gate.f_b_proj = passed
        gate.dt_bias = torch.nn.Parameter(self.weights.dt_bias)
        gate.A_log = torch.nn.Parameter(self.weights.a_log)
        gate.safe_gate_lower_bound = self.weights.least
        with torch.no_grad():
            found: Tensor = gate(a[None])[0]
        return found
