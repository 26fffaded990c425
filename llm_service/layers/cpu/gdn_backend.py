"""Gated delta nets on a CPU: tokens that come one by one, and their drafts, by numba's kernel, chunks by torch's
products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.cpu import gdn_step, selection
from llm_service.layers.gdn.backend import GdnBatch, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import FEW, TorchBackend, TorchBatch, split

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
        return _Batch(self._shape, self._plain.batch(runs) if runs else None, OneByOneSequences.of(rounds))


@dataclass(frozen=True, slots=True)
class OneByOneSequences:
    """Sequences whose tokens are computed one by one: `rows` int64 [2, s], where they begin and end in the batch,
    `slots` int64 [s] of their states, and whether they are its first, bool [s]."""

    rows: Array
    slots: Tensor
    fresh: Array

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Segment]]) -> OneByOneSequences:
        """Of rounds of segments of one token, of which each sequence has the first in the first.

        >>> rounds = [[Segment(0, 1, 7, fresh=False), Segment(1, 2, 3, fresh=True)], [Segment(2, 3, 3, fresh=False)]]
        >>> OneByOneSequences.of(rounds).rows.tolist()
        [[0, 1], [1, 3]]
        """
        counts = Counter(step.slot for steps in rounds for step in steps)
        numbers = [(step.begin, step.begin + counts[step.slot], step.slot, step.fresh) for step in rounds[0]]
        begins, ends, slots, fresh = np.array(numbers, np.int64).T
        return cls(np.stack([begins, ends]), torch.from_numpy(slots.copy()), fresh.astype(bool))


@dataclass(frozen=True, slots=True)
class _Batch:
    """`runs` computes what comes before the tokens that are computed one by one."""

    shape: GdnShape
    runs: TorchBatch | None
    sequences: OneByOneSequences

    def run(self, given: GdnInput, weights: GdnWeights, cache: StateCache) -> Tensor:
        """See `GdnBatch`."""
        dtype = given.qkv.dtype
        out = torch.empty(given.z.shape) if self.runs is None else self.runs.run(given, weights, cache).float()
        own = self.sequences
        convolution, recurrent = cache.tensors
        before, places = convolution, own.slots
        if dtype != torch.float32:  # the kernel has no other type: it gets copies of those that it changes
            before, places = convolution[own.slots].float(), torch.arange(len(own.slots))
        gdn_step.step(
            out.numpy(),
            [float_array(each) for each in (given.qkv, given.z, given.a, given.b)],
            (before.numpy(), recurrent.numpy()),
            (own.rows, torch.stack([places, own.slots]).numpy(), own.fresh),
            [float_array(each) for each in (weights.conv, weights.a_log, weights.dt_bias, weights.gain)],
            weights.eps,
            self.shape.key_heads,
        )
        if before is not convolution:
            convolution[own.slots] = before.to(dtype)
        return out.to(dtype)


def float_array(x: Tensor) -> Array:
    """float32, and in order."""
    array: Array = x.float().contiguous().numpy()
    return array
