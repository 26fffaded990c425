"""Kimi Delta Attention on a CPU: tokens that come one by one, and their drafts, by numba's kernel, chunks by torch's
products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import kda_step, selection
from llm_service.layers.cpu.one_by_one import OneByOneBatch, OneByOneSequences, Places, States, float_arrays
from llm_service.layers.gdn.torch_backend import FEW, split
from llm_service.layers.kda.backend import KdaBatch, KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBackend


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
        return OneByOneBatch(self._plain.batch(runs) if runs else None, OneByOneSequences.of(rounds), _step)


def _step(out: Array, given: KdaInput, weights: KdaWeights, states: States, places: Places) -> None:
    """See `OneByOneBatch`."""
    inputs = float_arrays(given.qkv, given.z, given.a, given.b)
    own = float_arrays(weights.conv, weights.a_log, weights.dt_bias, weights.gain)
    kda_step.step(out, inputs, states, places, own, weights.eps, weights.least)
