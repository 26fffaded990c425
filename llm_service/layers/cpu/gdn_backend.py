"""Gated delta nets on a CPU: tokens that come one by one, and their drafts, by numba's kernel, chunks by torch's
products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import gdn_step, selection
from llm_service.layers.cpu.one_by_one import OneByOneBatch, OneByOneSequences, Places, States, float_arrays
from llm_service.layers.gdn.backend import GdnBatch, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import FEW, TorchBackend, split


class NumbaBackend:
    """Makes batches for the kernel; while it is compiled, torch's."""

    name = "numba"
    kernels = frozenset({f"{gdn_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: GdnShape) -> None:
        self._shape = shape
        self._plain = TorchBackend(shape, torch.device("cpu"))

    def batch(self, segments: Sequence[Segment]) -> GdnBatch:
        """See `GdnBackend`."""
        runs, rounds = split(segments, FEW)
        if not rounds or not selection.is_numba():
            return self._plain.batch(segments)
        return OneByOneBatch(self._plain.batch(runs) if runs else None, OneByOneSequences.of(rounds), self._step)

    def _step(self, out: Array, given: GdnInput, weights: GdnWeights, states: States, places: Places) -> None:
        """See `OneByOneBatch`."""
        inputs = float_arrays(given.qkv, given.z, given.a, given.b)
        own = float_arrays(weights.conv, weights.a_log, weights.dt_bias, weights.gain)
        gdn_step.step(out, inputs, states, places, own, weights.eps, self._shape.key_heads)
