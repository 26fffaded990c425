"""Kimi Delta Attention by torch's operators, for every device and type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.elementwise import remainder, sigmoid, silu, softplus
from llm_service.layers.gdn.torch_backend import unit
from llm_service.layers.kda.backend import KdaInput, KdaShape, KdaWeights
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.convolution import Steps, convolve_run, convolve_steps
from llm_service.layers.recurrent.torch_backend import RecurrentTorchBackend

_NEAR = 16
"""Tokens whose pairs are multiplied elementwise, with the decay between them. For tokens further apart, both are
multiplied with the decay up to a token between them, so that no exponential exceeds 1."""
_LOWEST = -81.0
"""float32 can represent e to this and its inverse, times the values of keys and queries."""


class TorchBackend(RecurrentTorchBackend[KdaShape, KdaInput, KdaWeights]):
    """Makes batches of torch's operators."""

    def over(self, runs: Sequence[Segment], rounds: Sequence[Steps], _: Sequence[Segment], /) -> TorchBatch:
        """See `RecurrentTorchBackend`."""
        return TorchBatch(self._shape, runs, rounds)


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """A batch of torch's operators: runs, followed by rounds of single tokens."""

    shape: KdaShape
    runs: Sequence[Segment]
    rounds: Sequence[Steps]

    def run(self, given: KdaInput, weights: KdaWeights, cache: StateCache) -> Tensor:
        """See `KdaBatch`."""
        out = torch.empty_like(given.z, memory_format=torch.contiguous_format)
        g, beta = fading(given.a, weights), learned(given.b)
        for run in self.runs:
            self._run_chunks(run, out, given.qkv, g, beta, weights, cache)
        for steps in self.rounds:
            self._run_steps(steps, out, given.qkv, g, beta, weights, cache)
        return gated_norm(out, given.z, weights.gain, weights.eps)

    def _run_chunks(
        self, run: Segment, out: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, weights: KdaWeights, cache: StateCache
    ) -> None:
        before, state = cache.read(run)
        for begin in range(run.begin, run.end, CHUNK):
            part = slice(begin, min(begin + CHUNK, run.end))
            mixed, before = convolve_run(qkv[part].float(), before, weights.conv)
            query, key, value = (each.transpose(0, 1) for each in self._heads(mixed, qkv.dtype))
            read, state = chunk(query, key, value, g[part].transpose(0, 1), beta[part].t(), state, weights.least)
            out[part] = read.transpose(0, 1).flatten(1)
        cache.write(run, [before, state])

    def _run_steps(
        self, steps: Steps, out: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, weights: KdaWeights, cache: StateCache
    ) -> None:
        convolution, recurrent = cache.tensors
        mixed, after = convolve_steps(qkv[steps.rows].float(), steps.read(convolution), weights.conv)
        convolution[steps.slots] = after.to(convolution.dtype)
        states = steps.read(recurrent)
        read = step(*self._heads(mixed, qkv.dtype), g[steps.rows], beta[steps.rows], states)
        out[steps.rows] = read.flatten(1).to(out.dtype)
        recurrent[steps.slots] = states

    def _heads(self, mixed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's output, float32 [m, channels] → queries and keys, normalised to length 1, queries divided
        by √head_dim, and values, float32 [m, heads, head_dim] each, rounded as in a model of this type."""
        query, key, value = silu(mixed).to(dtype).float().unflatten(1, (3, self.shape.heads, -1)).unbind(1)
        return unit(query) * self.shape.head_dim**-0.5, unit(key), value


def fading(a: Tensor, weights: KdaWeights) -> Tensor:
    """a [n, values] → the logarithm of a state's decay: g, float32 [n, heads, head_dim]."""
    heads = len(weights.a_log)
    moved = (a.float() + weights.dt_bias.float()).unflatten(1, (heads, -1))
    rate = weights.a_log.float().exp().unsqueeze(1)
    return -rate * softplus(moved) if weights.least is None else sigmoid(rate * moved) * weights.least


def learned(b: Tensor) -> Tensor:
    """b [n, heads] → the update rate: β, float32 [n, heads]."""
    return sigmoid(b.float()).to(b.dtype).float()


def step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each of s sequences → what is read, float32 [s, heads, head_dim].

    Queries, keys, values and g [s, heads, head_dim], beta [s, heads]; state [s, heads, head_dim, head_dim] is changed.
    """
    state *= g.exp().unsqueeze(-1)
    change = beta.unsqueeze(-1) * (value - (state * key.unsqueeze(-1)).sum(-2))
    state += key.unsqueeze(-1) * change.unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(-2)


def chunk(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, least: float | None
) -> tuple[Tensor, Tensor]:
    """m tokens of a sequence at once → what they read, float32 [heads, m, head_dim], and the state behind them.

    Queries, keys, values and g [heads, m, head_dim], beta [heads, m], state [heads, head_dim, head_dim]. As in
    `gdn.torch_backend.chunk` what tokens change solves one unit lower triangular system.
    """
    total = g.cumsum(1)
    of_keys, of_queries = products(query, key, g, least)
    beta, left = beta.unsqueeze(-1), remainder(total)
    known = torch.cat([key * left, query * left], dim=1) @ state
    from_keys, from_queries = known.chunk(2, dim=1)
    wanted = (value - from_keys).mul_(beta)
    changes = torch.linalg.solve_triangular(of_keys.mul_(beta), wanted, upper=False, unitriangular=True)
    read = (of_queries @ changes).add_(from_queries)
    last = total[:, -1:]
    behind = (key * remainder(last - total)).transpose(1, 2) @ changes
    return read, behind.addcmul_(state, remainder(last).transpose(1, 2))


def products(query: Tensor, key: Tensor, g: Tensor, least: float | None) -> tuple[Tensor, Tensor]:
    """For each token and those up to itself, with the decay between them: products of its key and of its query with
    their keys, float32 [heads, m, m] each, 0 for later ones. Sums of g are short where it matters, so that decays of
    near tokens are not differences of large numbers."""
    heads, count, _ = key.shape
    both, total = torch.stack([key, query]), g.cumsum(1)
    found = both.new_zeros(2, heads, count, count)
    for begin in range(0, count, _NEAR):
        here = slice(begin, min(begin + _NEAR, count))
        own = g[:, here].cumsum(1)
        found[:, :, here, here] = near_products(both[:, :, here], own, least)
        if begin:
            between = total[:, begin - 1 : begin]
            far = key[:, :begin] * remainder(between - total[:, :begin])
            found[:, :, here, :begin] = (both[:, :, here] * remainder(own)) @ far.transpose(1, 2)
    of_keys, of_queries = found
    return of_keys, of_queries


def near_products(both: Tensor, own: Tensor, least: float | None) -> Tensor:
    """The same for few tokens: keys and queries [2, heads, m, head_dim], and sums of g from the first one on, [heads,
    m, head_dim] → [2, heads, m, m]. If no sum is so low that float32 cannot represent its exponential and the inverse,
    each factor is applied to one side."""
    if least is not None and least * own.shape[1] > _LOWEST:
        left = own.exp()
        return ((both * left) @ (both[0] / left).transpose(1, 2)).tril_()
    near = own.unsqueeze(2) - own.unsqueeze(1)  # [heads, m, m, head_dim]
    later = torch.ones(near.shape[1:3], dtype=torch.bool, device=own.device).triu(1)
    weighed = remainder(near.masked_fill_(later.unsqueeze(-1), -torch.inf)).mul_(both[0].unsqueeze(1))
    return (weighed @ both.unsqueeze(-1)).squeeze(-1)


def gated_norm(x: Tensor, z: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [n, values] over the root of each head's mean square, times gain [head_dim], times σ(z [n, values]), rounded
    once."""
    by_head = x.float().unflatten(1, (-1, len(gain)))
    normed = functional.rms_norm(by_head, gain.shape, gain.float(), eps)
    return (normed * sigmoid(z.float()).view_as(normed)).to(x.dtype).flatten(1)
