"""Gated delta nets on a CPU: decoded tokens and their drafts by numba's kernel, chunks of prompts by torch's
products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import gdn_step
from llm_service.layers.cpu.one_by_one import OneByOneBackend, Places, States, Step, float_arrays
from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import TorchBackend


class NumbaBackend(OneByOneBackend[GdnInput, GdnWeights]):
    """Decodes tokens by the kernel."""

    kernels = frozenset({f"{gdn_step.__name__}:step"})
    """See `NumbaCompiled`."""

    def __init__(self, shape: GdnShape) -> None:
        super().__init__(TorchBackend(shape, torch.device("cpu")))
        self._shape = shape

    def step_of(self, _: Sequence[Segment]) -> Step[GdnInput, GdnWeights]:
        """See `OneByOneBackend`."""
        return self._step

    def _step(self, out: Array, given: GdnInput, weights: GdnWeights, states: States, places: Places) -> None:
        inputs = float_arrays(given.qkv, given.z, given.a, given.b)
        own = float_arrays(weights.conv, weights.a_log, weights.dt_bias, weights.gain)
        gdn_step.step(out, inputs, states, places, own, weights.eps, self._shape.key_heads)
