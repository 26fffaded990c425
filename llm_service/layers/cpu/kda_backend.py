"""Kimi Delta Attention on a CPU: decoded tokens and their drafts by numba's kernel, chunks of prompts by torch's
products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import kda_step
from llm_service.layers.cpu.one_by_one import OneByOneBackend, Places, States, Step, float_arrays
from llm_service.layers.kda.backend import KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBackend


class NumbaBackend(OneByOneBackend[KdaInput, KdaWeights]):
    """Decodes tokens by the kernel."""

    kernels = frozenset({f"{kda_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: KdaShape) -> None:
        super().__init__(TorchBackend(shape, torch.device("cpu")))

    def step_of(self, _: Sequence[Segment]) -> Step[KdaInput, KdaWeights]:
        """See `OneByOneBackend`."""
        return _step


def _step(out: Array, given: KdaInput, weights: KdaWeights, states: States, places: Places) -> None:
    inputs = float_arrays(given.qkv, given.z, given.a, given.b)
    own = float_arrays(weights.conv, weights.a_log, weights.dt_bias, weights.gain)
    kda_step.step(out, inputs, states, places, own, weights.eps, weights.least)
