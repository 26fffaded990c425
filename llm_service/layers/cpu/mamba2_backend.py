"""Mamba-2 on a CPU: tokens that come one by one, and their drafts, by numba's kernel, chunks by torch's products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.cpu import mamba2_step, selection
from llm_service.layers.cpu.gdn_backend import OneByOneSequences, float_array
from llm_service.layers.gdn.torch_backend import FEW, split
from llm_service.layers.mamba2.backend import Mamba2Batch, Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.torch_backend import TorchBackend, TorchBatch, floors_of

_CPU = torch.device("cpu")


class NumbaBackend:
    """Makes batches for the kernel; while it is compiled, torch's."""

    name = "numba"
    kernels = frozenset({f"{mamba2_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: Mamba2Shape) -> None:
        self._shape = shape
        self._plain = TorchBackend(shape, _CPU)

    def batch(self, segments: Sequence[Segment]) -> Mamba2Batch:
        """See `Mamba2Backend`."""
        runs, rounds = split(segments, FEW)
        if not rounds or not selection.is_numba():
            return self._plain.batch(segments)
        floors = floors_of(segments, self._shape.least_step)
        before = TorchBatch(self._shape, tuple(runs), [], floors) if runs else None
        return _Mamba2Steps(self._shape, before, OneByOneSequences.of(rounds), floors)


@dataclass(frozen=True, slots=True)
class _Mamba2Steps:
    """`runs` computes what comes before the tokens that are computed one by one; `floors` is of `floors_of`."""

    shape: Mamba2Shape
    runs: TorchBatch | None
    sequences: OneByOneSequences
    floors: Tensor | None

    def run(self, given: Mamba2Input, weights: Mamba2Weights, cache: StateCache) -> Tensor:
        """See `Mamba2Batch`."""
        dtype = given.z.dtype
        out = torch.empty(given.z.shape) if self.runs is None else self.runs.run(given, weights, cache).float()
        own, floors = self.sequences, torch.zeros(len(out)) if self.floors is None else self.floors.flatten()
        convolution, recurrent = cache.tensors
        before, places = convolution, own.slots
        if dtype != torch.float32:  # the kernel has no other type: it gets copies of those that it changes
            before, places = convolution[own.slots].float(), torch.arange(len(own.slots))
        of_heads = weights.conv, weights.conv_bias, weights.a_log, weights.dt_bias, weights.d, weights.gain
        mamba2_step.step(
            out.numpy(),
            [float_array(each) for each in (given.z, given.xbc, given.dt)],
            floors.numpy(),
            (before.numpy(), recurrent.numpy()),
            (own.rows, torch.stack([places, own.slots]).numpy(), own.fresh),
            [float_array(each) for each in of_heads],
            weights.eps,
            self.shape.groups,
        )
        if before is not convolution:
            convolution[own.slots] = before.to(dtype)
        return out.to(dtype)
