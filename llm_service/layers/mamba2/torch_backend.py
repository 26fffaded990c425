"""Mamba-2 by torch's operators, for every device and type: the reference for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.elementwise import remainder, silu, softplus
from llm_service.layers.mamba2.backend import Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.convolution import Steps, convolve_run, convolve_steps
from llm_service.layers.recurrent.torch_backend import RecurrentTorchBackend


class TorchBackend(RecurrentTorchBackend[Mamba2Shape, Mamba2Input, Mamba2Weights]):
    """Makes batches of torch's operators."""

    def over(self, runs: Sequence[Segment], rounds: Sequence[Steps], segments: Sequence[Segment], /) -> TorchBatch:
        """See `RecurrentTorchBackend`."""
        floors = floors_of(segments, self._shape.least_step)
        return TorchBatch(self._shape, runs, rounds, None if floors is None else floors.to(self._device))


def floors_of(segments: Sequence[Segment], least: float) -> Tensor | None:
    """float32 [n, 1]: what Δ of each token is at least; None where that says nothing. An answer's tokens have no such
    bound, as transformers' kernels for one token know of none, be it that they are computed anew at once.

    >>> floors_of([Segment(0, 1, 0, fresh=False, answers=1), Segment(1, 4, 1, fresh=True, answers=1)], 0.5).tolist()
    [[0.0], [0.5], [0.5], [0.0]]
    """
    if not least or all(segment.answers == segment.end - segment.begin for segment in segments):
        return None
    floors = torch.full((segments[-1].end, 1), least)
    for segment in segments:
        floors[segment.end - segment.answers : segment.end] = 0.0
    return floors


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """A batch of torch's operators; `floors` is of `floors_of`."""

    shape: Mamba2Shape
    runs: Sequence[Segment]
    rounds: Sequence[Steps]
    floors: Tensor | None

    def run(self, given: Mamba2Input, weights: Mamba2Weights, cache: StateCache) -> Tensor:
        """See `Mamba2Batch`."""
        out = torch.empty(given.z.shape, device=given.z.device)
        delta, decay = (each.unflatten(1, (-1, self.shape.group)) for each in steps_of(given.dt, weights, self.floors))
        for run in self.runs:
            self._run_chunks(run, out, given.xbc, delta, decay, weights, cache)
        for steps in self.rounds:
            self._run_steps(steps, out, given.xbc, delta, decay, weights, cache)
        return gated_norm(out, given.z, weights, self.shape.groups)

    def _run_chunks(
        self,
        run: Segment,
        out: Tensor,
        xbc: Tensor,
        delta: Tensor,
        decay: Tensor,
        weights: Mamba2Weights,
        cache: StateCache,
    ) -> None:
        """One after the other, so that a chunk's intermediates are still in cache when they are used."""
        before, state = cache.read(run)
        state = state.unflatten(0, (-1, self.shape.group))
        for begin in range(run.begin, run.end, CHUNK):
            part = slice(begin, min(begin + CHUNK, run.end))
            mixed, before = convolve_run(xbc[part], before, weights.conv)
            x, key, query = (each.movedim(0, -2) for each in heads(self.shape, mixed, weights))
            here = delta[part].movedim(0, -1).unsqueeze(-1)
            read, state = chunk(x * here, key, query, decay[part].movedim(0, -1), state)
            out[part] = read.addcmul_(x, by_head(weights.d, self.shape)).movedim(-2, 0).flatten(1)
        cache.write(run, [before, state.flatten(0, 1)])

    def _run_steps(
        self,
        steps: Steps,
        out: Tensor,
        xbc: Tensor,
        delta: Tensor,
        decay: Tensor,
        weights: Mamba2Weights,
        cache: StateCache,
    ) -> None:
        convolution, recurrent = cache.tensors
        mixed, after = convolve_steps(xbc[steps.rows], steps.read(convolution), weights.conv)
        convolution[steps.slots] = after
        x, key, query = heads(self.shape, mixed, weights)
        states = steps.read(recurrent).unflatten(1, (-1, self.shape.group))
        read = step(x * delta[steps.rows].unsqueeze(-1), key, query, decay[steps.rows], states)
        out[steps.rows] = read.addcmul_(x, by_head(weights.d, self.shape).squeeze(-2)).flatten(1)
        recurrent[steps.slots] = states.flatten(1, 2)


def steps_of(dt: Tensor, weights: Mamba2Weights, floors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Δ, and the logarithm of a state's decay: float32 [n, heads] each."""
    delta = softplus(dt.float() + weights.dt_bias.float())
    if floors is not None:
        delta = torch.maximum(delta, floors)
    return delta, -weights.a_log.float().exp() * delta


def heads(shape: Mamba2Shape, mixed: Tensor, weights: Mamba2Weights) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's output [m, channels] → x [m, groups, group, head_dim], B and C [m, groups, 1, state],
    float32."""
    opened = silu(mixed.float() + weights.conv_bias.float())
    x, key, query = opened.split([shape.values, shape.keys, shape.keys], dim=1)
    key, query = (each.unflatten(1, (shape.groups, 1, shape.state_dim)) for each in (key, query))
    return x.unflatten(1, (shape.groups, shape.group, shape.head_dim)), key, query


def by_head(d: Tensor, shape: Mamba2Shape) -> Tensor:
    """float32 [groups, group, 1, 1]."""
    return d.float().view(shape.groups, shape.group, 1, 1)


def step(values: Tensor, key: Tensor, query: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """One token of each of s sequences → what is read, float32 [s, groups, group, head_dim].

    values, Δ · x, has the same shape; key and query [s, groups, 1, state], decay [s, groups, group]; state [s, groups,
    group, state, head_dim] is changed.
    """
    state *= decay.exp()[..., None, None]
    state += key.unsqueeze(-1) * values.unsqueeze(-2)
    return (query.unsqueeze(-2) @ state).squeeze(-2)


def chunk(values: Tensor, key: Tensor, query: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """m tokens of a sequence at once → what they read, float32 [groups, group, m, head_dim], and the state behind them.

    values, Δ · x, has the same shape; key and query [groups, 1, m, state], decay [groups, group, m], state [groups,
    group, state, head_dim].
    """
    count = key.shape[-2]
    total = decay.cumsum(-1).unsqueeze(-1)
    later = torch.ones(count, count, dtype=torch.bool, device=decay.device).triu(1)
    within = remainder((total - total.transpose(-1, -2)).masked_fill_(later, -torch.inf))
    within *= query @ key.transpose(-1, -2)
    read = (query @ state).mul_(remainder(total)).add_(within @ values)
    last = total[..., -1:, :]
    left = key.transpose(-1, -2) @ (values * remainder(last - total))
    return read, left.addcmul_(state, remainder(last))


def gated_norm(x: Tensor, z: Tensor, weights: Mamba2Weights, groups: int) -> Tensor:
    """float32 x [n, values] times SiLU(z [n, values]), over the root of each group's mean square, times gain, in the
    type of z."""
    opened = (x * silu(z.float())).unflatten(1, (groups, -1))
    normed = functional.rms_norm(opened, opened.shape[-1:], None, weights.eps).flatten(1)
    return weights.gain * normed.to(z.dtype)
