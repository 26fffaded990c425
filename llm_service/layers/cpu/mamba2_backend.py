"""Mamba-2 on a CPU: tokens that come one by one, and their drafts, by numba's kernel, chunks by torch's products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import mamba2_step, selection
from llm_service.layers.cpu.one_by_one import OneByOneBatch, OneByOneSequences, Places, States, float_arrays
from llm_service.layers.gdn.torch_backend import FEW, split
from llm_service.layers.mamba2.backend import Mamba2Batch, Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.torch_backend import TorchBackend, TorchBatch, floors_of


class NumbaBackend:
    """Makes batches for the kernel; while it is compiled, torch's."""

    name = "numba"
    kernels = frozenset({f"{mamba2_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: Mamba2Shape) -> None:
        self._shape = shape
        self._plain = TorchBackend(shape, torch.device("cpu"))

    def batch(self, segments: Sequence[Segment]) -> Mamba2Batch:
        """See `Mamba2Backend`."""
        runs, rounds = split(segments, FEW)
        if not rounds or not selection.is_numba():
            return self._plain.batch(segments)
        floors = floors_of(segments, self._shape.least_step)
        before = TorchBatch(self._shape, tuple(runs), [], floors) if runs else None
        return OneByOneBatch(before, OneByOneSequences.of(rounds), partial(self._step, floors))

    def _step(
        self,
        floors: Tensor | None,
        out: Array,
        given: Mamba2Input,
        weights: Mamba2Weights,
        states: States,
        places: Places,
    ) -> None:
        """See `OneByOneBatch`; `floors` is of `floors_of`."""
        least = np.zeros(len(out), np.float32) if floors is None else floors.flatten().numpy()
        inputs, both = float_arrays(given.z, given.xbc, given.dt), (weights.conv, weights.conv_bias)
        own = float_arrays(*both, weights.a_log, weights.dt_bias, weights.d, weights.gain)
        mamba2_step.step(out, inputs, least, states, places, own, weights.eps, self._shape.groups)
