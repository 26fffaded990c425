"""Gated delta nets on a CPU: tokens that come one by one by numba's kernel, chunks by torch's products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.cpu import gdn_step, selection
from llm_service.layers.gdn.backend import GdnBatch, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import FEW, Steps, TorchBackend, TorchBatch, split

_CPU = torch.device("cpu")


class NumbaBackend:
    """Makes batches for the kernel; while it is compiled, torch's."""

    name = "numba"
    kernels = frozenset({f"{gdn_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: GdnShape) -> None:
        self._shape = shape
        self._plain = TorchBackend(shape, _CPU)

    def batch(self, segments: Sequence[Segment]) -> GdnBatch:
        """See `GdnBackend`."""
        runs, rounds = split(segments, FEW)
        if not rounds or not selection.is_numba():
            return self._plain.batch(segments)
        return _Batch(self._shape, self._plain.batch(runs) if runs else None, Steps.of(rounds, _CPU))


@dataclass(frozen=True, slots=True)
class _Batch:
    """`runs` computes what comes before the steps of all rounds."""

    shape: GdnShape
    runs: TorchBatch | None
    rounds: list[Steps]

    def run(self, given: GdnInput, weights: GdnWeights, cache: StateCache) -> Tensor:
        """See `GdnBatch`."""
        dtype = given.qkv.dtype
        out = torch.empty(given.z.shape) if self.runs is None else self.runs.run(given, weights, cache).float()
        rows = [_array(each) for each in (given.qkv, given.z, given.a, given.b)]
        for steps in self.rounds:
            self._run_steps(steps, out, rows, weights, cache, dtype)
        return out.to(dtype)

    def _run_steps(
        self,
        steps: Steps,
        out: Tensor,
        given: Sequence[Array],
        weights: GdnWeights,
        cache: StateCache,
        dtype: torch.dtype,
    ) -> None:
        convolution, recurrent = cache.tensors
        before, places = convolution, steps.slots
        if dtype != torch.float32:  # the kernel has no other type: it gets copies of those that it changes
            before, places = convolution[steps.slots].float(), torch.arange(len(steps.slots))
        gdn_step.step(
            out.numpy(),
            given,
            (before.numpy(), recurrent.numpy()),
            (steps.rows.numpy(), torch.stack([places, steps.slots]).numpy(), steps.fresh.numpy()),
            [_array(each) for each in (weights.conv, weights.a_log, weights.dt_bias, weights.gain)],
            weights.eps,
            self.shape.key_heads,
        )
        if before is not convolution:
            convolution[steps.slots] = before.to(dtype)


def _array(x: Tensor) -> Array:
    """float32, and in order."""
    array: Array = x.float().contiguous().numpy()
    return array
