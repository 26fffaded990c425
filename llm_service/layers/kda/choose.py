"""Chooses the back end of Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llm_service.layers.kda.backend import KdaBackend, KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBackend
from llm_service.layers.recurrent.choose import best_of, gets_through


def choose(shape: KdaShape, dtype: torch.dtype, device: torch.device) -> KdaBackend:
    """See `best_of`."""

    def numba() -> KdaBackend:
        from llm_service.layers.cpu.kda_backend import NumbaBackend

        return NumbaBackend(shape)

    def triton() -> Iterator[KdaBackend]:
        from llm_service.layers.kda.triton_backend import TritonBackend

        yield TritonBackend(shape, dtype, device)

    return best_of(
        device,
        numba=numba,
        triton=triton,
        runs=lambda backend: runs(backend, shape, dtype, device),
        plain=lambda: TorchBackend(shape, device),
    )


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
