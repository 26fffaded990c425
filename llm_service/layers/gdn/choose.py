"""Chooses the back end of gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llm_service.layers.gdn.backend import GdnBackend, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import TorchBackend
from llm_service.layers.recurrent.choose import TRIED, best_of, gets_through, noise


def choose(shape: GdnShape, dtype: torch.dtype, device: torch.device) -> GdnBackend:
    """See `best_of`; on a GPU, chunks are computed by flash-linear-attention if it is installed and runs."""

    def numba() -> GdnBackend:
        from llm_service.layers.cpu.gdn_backend import NumbaBackend

        return NumbaBackend(shape)

    def triton() -> Iterator[GdnBackend]:
        from llm_service.layers.gdn import fla_rule
        from llm_service.layers.gdn.triton_backend import TritonBackend

        rule = None if dtype == torch.float32 else fla_rule.find(shape)
        if rule is not None:
            yield TritonBackend(shape, dtype, device, rule)
        yield TritonBackend(shape, dtype, device)

    return best_of(
        device,
        numba=numba,
        triton=triton,
        runs=lambda backend: runs(backend, shape, dtype, device),
        plain=lambda: TorchBackend(shape, device),
    )


def runs(backend: GdnBackend, shape: GdnShape, dtype: torch.dtype, device: torch.device) -> bool:
    """See `gets_through`."""
    heads, made = shape.value_heads, partial(noise, device=device, dtype=dtype)
    conv, gain = made(shape.channels, shape.width, scale=0.5), 1 + made(shape.value_dim, scale=0.1)
    weights = GdnWeights(conv, made(heads), made(heads), gain, 1e-6)
    given = GdnInput(made(TRIED, shape.channels), made(TRIED, shape.values), made(TRIED, heads), made(TRIED, heads))
    new_cache = partial(shape.state(dtype).new_cache, 2, device)
    return gets_through("gated delta nets", backend, TorchBackend(shape, device), given, weights, new_cache)
