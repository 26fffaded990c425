"""Chooses the back end of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llm_service.layers.mamba2.backend import Mamba2Backend, Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.torch_backend import TorchBackend
from llm_service.layers.recurrent.choose import TRIED, best_of, gets_through, noise


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
    made, long = (partial(noise, device=device, dtype=each) for each in (dtype, torch.float32))
    of_head, conv = long(shape.heads), made(shape.channels, shape.width, scale=0.5)
    gain = 1 + made(shape.values, scale=0.1)
    weights = Mamba2Weights(conv, made(shape.channels), of_head, of_head, of_head, gain, 1e-5)
    given = Mamba2Input(made(TRIED, shape.values), made(TRIED, shape.channels), made(TRIED, shape.heads))
    new_cache = partial(shape.state(dtype).new_cache, 2, device)
    return gets_through("Mamba-2", backend, TorchBackend(shape, device), given, weights, new_cache)
