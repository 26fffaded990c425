"""Mamba-2 on a CPU: decoded tokens and their drafts by numba's kernel, chunks of prompts by torch's products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import mamba2_step
from llm_service.layers.cpu.one_by_one import OneByOneBackend, Places, States, Step, float_arrays
from llm_service.layers.mamba2.backend import Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.torch_backend import TorchBackend, floors_of


class NumbaBackend(OneByOneBackend[Mamba2Input, Mamba2Weights]):
    """Decodes tokens by the kernel."""

    kernels = frozenset({f"{mamba2_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__(TorchBackend(shape, torch.device("cpu")))
        self._shape = shape

    def step_of(self, segments: Sequence[Segment]) -> Step[Mamba2Input, Mamba2Weights]:
        """See `OneByOneBackend`."""
        return partial(self._step, floors_of(segments, self._shape.least_step))

    def _step(
        self,
        floors: Tensor | None,
        out: Array,
        given: Mamba2Input,
        weights: Mamba2Weights,
        states: States,
        places: Places,
    ) -> None:
        """`floors` is of `floors_of`."""
        least = np.zeros(len(out), np.float32) if floors is None else floors.flatten().numpy()
        inputs, both = float_arrays(given.z, given.xbc, given.dt), (weights.conv, weights.conv_bias)
        own = float_arrays(*both, weights.a_log, weights.dt_bias, weights.d, weights.gain)
        mamba2_step.step(out, inputs, least, states, places, own, weights.eps, self._shape.groups)
