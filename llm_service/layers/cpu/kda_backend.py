"""Kimi Delta Attention on a CPU: tokens that come one by one, and their drafts, by numba's kernel, chunks by torch's
products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.cpu import kda_step, selection
from llm_service.layers.cpu.gdn_backend import OneByOneSequences, float_array
from llm_service.layers.gdn.torch_backend import FEW, split
from llm_service.layers.kda.backend import KdaBatch, KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBackend, TorchBatch


class NumbaBackend:
    """Makes batches for the kernel; while it is compiled, torch's."""

    name = "numba"
    kernels = frozenset({f"{kda_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: KdaShape) -> None:
        self._plain = TorchBackend(shape, torch.device("cpu"))

    def batch(self, segments: Sequence[Segment]) -> KdaBatch:
        """See `KdaBackend`."""
        runs, rounds = split(segments, FEW)
        if not rounds or not selection.is_numba():
            return self._plain.batch(segments)
        return _Batch(self._plain.batch(runs) if runs else None, OneByOneSequences.of(rounds))


@dataclass(frozen=True, slots=True)
class _Batch:
    """`runs` computes what comes before the tokens that are computed one by one."""

    runs: TorchBatch | None
    sequences: OneByOneSequences

    def run(self, given: KdaInput, weights: KdaWeights, cache: StateCache) -> Tensor:
        """See `KdaBatch`."""
        dtype = given.qkv.dtype
        out = torch.empty(given.z.shape) if self.runs is None else self.runs.run(given, weights, cache).float()
        own = self.sequences
        convolution, recurrent = cache.tensors
        before, places = convolution, own.slots
        if convolution.dtype != torch.float32:  # the kernel has no other type: it gets copies of those that it changes
            before, places = convolution[own.slots].float(), torch.arange(len(own.slots))
        kda_step.step(
            out.numpy(),
            [float_array(each) for each in (given.qkv, given.z, given.a, given.b)],
            (before.numpy(), recurrent.numpy()),
            (own.rows, torch.stack([places, own.slots]).numpy(), own.fresh),
            [float_array(each) for each in (weights.conv, weights.a_log, weights.dt_bias, weights.gain)],
            weights.eps,
            weights.least,
        )
        if before is not convolution:
            convolution[own.slots] = before.to(convolution.dtype)
        return out.to(dtype)
