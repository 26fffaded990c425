"""Chooses the back end of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llm_service.layers.mamba2.backend import Mamba2Backend, Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.torch_backend import TorchBackend
from llm_service.layers.recurrent.choose import best_of, gets_through


def choose(shape: Mamba2Shape, dtype: torch.dtype, device: torch.device) -> Mamba2Backend:
    """See `best_of`."""

    def numba() -> Mamba2Backend:
        from llm_service.layers.cpu.mamba2_backend import NumbaBackend

        return NumbaBackend(shape)

    def triton() -> Iterator[Mamba2Backend]:
        from llm_service.layers.mamba2.triton_backend import TritonBackend

        yield TritonBackend(shape, dtype, device)

    return best_of(
        device,
        numba=numba,
        triton=triton,
        runs=lambda backend: runs(backend, shape, dtype, device),
        plain=lambda: TorchBackend(shape, device),
    )


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
