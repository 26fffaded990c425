"""Which back end computes gated delta nets: the best that is there."""

from __future__ import annotations

import importlib.util

import torch

from llm_service.layers.gdn.backend import GdnBackend, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import TorchBackend
from llm_service.layers.recurrence import gets_through


def choose(shape: GdnShape, dtype: torch.dtype, device: torch.device) -> GdnBackend:
    """numba's kernel on a CPU; on a GPU Triton's, with chunks by flash-linear-attention where that is installed, if
    they pass a trial; else torch's operators."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from llm_service.layers.cpu.gdn_backend import NumbaBackend

        return NumbaBackend(shape)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from llm_service.layers.gdn import fla_rule
        from llm_service.layers.gdn.triton_backend import TritonBackend

        rules = (fla_rule.find(shape) if dtype != torch.float32 else None, None)
        for rule in dict.fromkeys(rules):
            backend = TritonBackend(shape, dtype, device, rule)
            if runs(backend, shape, dtype, device):
                return backend
    return TorchBackend(shape, device)


def runs(backend: GdnBackend, shape: GdnShape, dtype: torch.dtype, device: torch.device) -> bool:
    """See `gets_through`."""
    heads, cache = shape.value_heads, shape.state(dtype).new_cache(2, device)

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    weights = GdnWeights(zeros(shape.channels, shape.width), zeros(heads), zeros(heads), zeros(shape.value_dim), 1e-6)
    given = GdnInput(zeros(3, shape.channels), zeros(3, shape.values), zeros(3, heads), zeros(3, heads))
    return gets_through("gated delta nets", backend, given, weights, cache)
