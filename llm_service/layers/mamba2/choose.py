"""Which back end computes Mamba-2: the best that is there."""

from __future__ import annotations

import importlib.util

import torch

from llm_service.layers.mamba2.backend import Mamba2Backend, Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.torch_backend import TorchBackend
from llm_service.layers.recurrence import gets_through


def choose(shape: Mamba2Shape, dtype: torch.dtype, device: torch.device) -> Mamba2Backend:
    """numba's kernel on a CPU; on a GPU Triton's, if they pass a trial; else torch's operators."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from llm_service.layers.cpu.mamba2_backend import NumbaBackend

        return NumbaBackend(shape)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from llm_service.layers.mamba2.triton_backend import TritonBackend

        backend = TritonBackend(shape, dtype, device)
        if runs(backend, shape, dtype, device):
            return backend
    return TorchBackend(shape, device)


def runs(backend: Mamba2Backend, shape: Mamba2Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """See `gets_through`."""
    cache = shape.state(dtype).new_cache(2, device)

    def zeros(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    of_head = zeros(shape.heads, dtype=torch.float32)
    conv, bias = zeros(shape.channels, shape.width), zeros(shape.channels)
    weights = Mamba2Weights(conv, bias, of_head, of_head, of_head, zeros(shape.values), 1e-5)
    given = Mamba2Input(zeros(3, shape.values), zeros(3, shape.channels), zeros(3, shape.heads))
    return gets_through("Mamba-2", backend, given, weights, cache)
