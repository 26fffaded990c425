"""Chooses the back end of gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llm_service.layers.gdn.backend import GdnBackend, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import TorchBackend
from llm_service.layers.recurrent.choose import best_of, gets_through


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
    heads, cache = shape.value_heads, shape.state(dtype).new_cache(2, device)

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    weights = GdnWeights(zeros(shape.channels, shape.width), zeros(heads), zeros(heads), zeros(shape.value_dim), 1e-6)
    given = GdnInput(zeros(3, shape.channels), zeros(3, shape.values), zeros(3, heads), zeros(3, heads))
    return gets_through("gated delta nets", backend, given, weights, cache)
