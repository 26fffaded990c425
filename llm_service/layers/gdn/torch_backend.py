"""Gated delta nets by torch's operators, for every device and type: the reference for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.elementwise import remainder, sigmoid, silu, softplus
from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.convolution import Steps, convolve_run, convolve_steps
from llm_service.layers.recurrent.torch_backend import RecurrentTorchBackend

_EPS = 1e-6
"""Under the root of a head's length."""


class TorchBackend(RecurrentTorchBackend[GdnShape, GdnInput, GdnWeights]):
    """Makes batches of torch's operators."""

    def over(self, runs: Sequence[Segment], rounds: Sequence[Steps], _: Sequence[Segment], /) -> TorchBatch:
        """See `RecurrentTorchBackend`."""
        return TorchBatch(self._shape, runs, rounds)


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """A batch of torch's operators."""

    shape: GdnShape
    runs: Sequence[Segment]
    rounds: Sequence[Steps]

    def run(self, given: GdnInput, weights: GdnWeights, cache: StateCache) -> Tensor:
        """See `GdnBatch`."""
        out = torch.empty_like(given.z, memory_format=torch.contiguous_format)
        g, beta = (each.unflatten(1, (-1, self.shape.group)) for each in gates(given.a, given.b, weights))
        for run in self.runs:
            self._run_chunks(run, out, given.qkv, g, beta, weights, cache)
        for steps in self.rounds:
            self._run_steps(steps, out, given.qkv, g, beta, weights, cache)
        return gated_norm(out, given.z, weights.gain, weights.eps)

    def _run_chunks(
        self, run: Segment, out: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, weights: GdnWeights, cache: StateCache
    ) -> None:
        """One after the other, so that a chunk's intermediates are still in cache when they are used."""
        before, state = cache.read(run)
        state = state.unflatten(0, (-1, self.shape.group))
        for begin in range(run.begin, run.end, CHUNK):
            part = slice(begin, min(begin + CHUNK, run.end))
            mixed, before = convolve_run(qkv[part], before, weights.conv)
            query, key, value = (each.movedim(0, -2) for each in heads(self.shape, silu(mixed).float()))
            read, state = chunk(query, key, value, g[part].movedim(0, -1), beta[part].movedim(0, -1), state)
            out[part] = read.movedim(-2, 0).flatten(1)
        cache.write(run, [before, state.flatten(0, 1)])

    def _run_steps(
        self, steps: Steps, out: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, weights: GdnWeights, cache: StateCache
    ) -> None:
        convolution, recurrent = cache.tensors
        mixed, after = convolve_steps(qkv[steps.rows], steps.read(convolution), weights.conv)
        convolution[steps.slots] = after
        query, key, value = heads(self.shape, silu(mixed).float())
        states = steps.read(recurrent).unflatten(1, (-1, self.shape.group))
        read = step(query, key, value, g[steps.rows], beta[steps.rows], states)
        out[steps.rows] = read.flatten(1).to(out.dtype)
        recurrent[steps.slots] = states.flatten(1, 2)


def gates(a: Tensor, b: Tensor, weights: GdnWeights) -> tuple[Tensor, Tensor]:
    """The logarithm of a state's decay, and the update rate: g and β, float32 [n, value_heads]."""
    g = -weights.a_log.float().exp() * softplus(a.float() + weights.dt_bias.float())
    return g, sigmoid(b.float()).to(b.dtype).float()


def heads(shape: GdnShape, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [m, channels] → queries and keys [m, key_heads, 1, key_dim], each 1 long, queries over √key_dim; values
    [m, key_heads, group, value_dim]."""
    query, key, value = mixed.split([shape.keys, shape.keys, shape.values], dim=1)
    query, key = (unit(each.unflatten(1, (shape.key_heads, 1, shape.key_dim))) for each in (query, key))
    return query * shape.key_dim**-0.5, key, value.unflatten(1, (shape.key_heads, shape.group, shape.value_dim))


def unit(x: Tensor) -> Tensor:
    """Vectors over their lengths."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each of s sequences → what is read, float32 [s, key_heads, group, value_dim].

    Heads as returned by `heads`; g and beta [s, key_heads, group]; state [s, key_heads, group, key_dim, value_dim] is
    changed.
    """
    state *= g.exp()[..., None, None]
    change = beta[..., None] * (value - (state * key.unsqueeze(-1)).sum(-2))
    state += key.unsqueeze(-1) * change.unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(-2)


def chunk(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """m tokens of a sequence at once → what they read, float32 [key_heads, group, m, value_dim], and the state behind
    them.

    query and key [key_heads, 1, m, key_dim], value [key_heads, group, m, value_dim], g and beta [key_heads, group, m],
    state [key_heads, group, key_dim, value_dim]. What a token changes depends on the changes before it: together they
    solve one unit lower triangular system.
    """
    count = key.shape[-2]
    both = torch.cat([key, query], dim=-2)
    products = both @ both[..., :count, :].transpose(-1, -2)
    total, beta = g.cumsum(-1).unsqueeze(-1), beta.unsqueeze(-1)
    later = torch.ones(count, count, dtype=torch.bool, device=g.device).triu(1)
    decay = remainder((total - total.transpose(-1, -2)).masked_fill_(later, -torch.inf))
    known = both @ state
    known.unflatten(-2, (2, count)).mul_(remainder(total).unsqueeze(-3))
    system = (products[..., :count, :] * decay).mul_(beta)
    wanted = (value - known[..., :count, :]).mul_(beta)
    changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = (decay.mul_(products[..., count:, :]) @ changes).add_(known[..., count:, :])
    last = total[..., -1:, :]
    left = both[..., :count, :].transpose(-1, -2) @ changes.mul_(remainder(last - total))
    return read, left.addcmul_(state, remainder(last))


def gated_norm(x: Tensor, z: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [n, values] over the root of each head's mean square, times gain [value_dim], times SiLU(z [n, values])."""
    by_head = x.unflatten(1, (-1, len(gain)))
    normed = gain * functional.rms_norm(by_head.float(), gain.shape, None, eps).to(x.dtype)
    out = normed * silu(z.float()).view_as(normed)
    return out.to(x.dtype).flatten(1)
