"""Which back end computes Kimi Delta Attention: the best that is there."""

from __future__ import annotations

import importlib.util

import torch

from llm_service.layers.kda.backend import KdaBackend, KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBackend
from llm_service.layers.recurrence import gets_through


def choose(shape: KdaShape, dtype: torch.dtype, device: torch.device) -> KdaBackend:
    """numba's kernel on a CPU; on a GPU Triton's, if they pass a trial; else torch's operators."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from llm_service.layers.cpu.kda_backend import NumbaBackend

        return NumbaBackend(shape)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from llm_service.layers.kda.triton_backend import TritonBackend

        backend = TritonBackend(shape, dtype, device)
        if runs(backend, shape, dtype, device):
            return backend
    return TorchBackend(shape, device)


def runs(backend: KdaBackend, shape: KdaShape, dtype: torch.dtype, device: torch.device) -> bool:
    """See `gets_through`."""
    cache = shape.state(dtype).new_cache(2, device)

    def zeros(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    long = torch.float32
    of_channels = zeros(shape.channels, shape.width, dtype=long), zeros(shape.heads, dtype=long)
    weights = KdaWeights(*of_channels, zeros(shape.values, dtype=long), zeros(shape.head_dim, dtype=long), 1e-5, -5.0)
    given = KdaInput(zeros(3, shape.channels), zeros(3, shape.values), zeros(3, shape.values), zeros(3, shape.heads))
    return gets_through("KDA", backend, given, weights, cache)
