"""Chooses the back end of Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llm_service.layers.kda.backend import KdaBackend, KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBackend
from llm_service.layers.recurrent.choose import TRIED, best_of, gets_through, noise


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
    made, long = (partial(noise, device=device, dtype=each) for each in (dtype, torch.float32))
    conv, gain = long(shape.channels, shape.width, scale=0.5), 1 + long(shape.head_dim, scale=0.1)
    weights = KdaWeights(conv, long(shape.heads), long(shape.values), gain, 1e-5, -5.0)
    sizes = shape.channels, shape.values, shape.values, shape.heads
    given = KdaInput(*(made(TRIED, size) for size in sizes))
    new_cache = partial(shape.state(dtype).new_cache, 2, device)
    return gets_through("KDA", backend, TorchBackend(shape, device), given, weights, new_cache)
