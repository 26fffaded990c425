"""Chooses the back end of layers that read and write a state for each token."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from common.telemetry import log
from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.recurrent.backend import Given_contra, RecurrentBackend, Weights_contra

_log = log.get("recurrence")

Backend = TypeVar("Backend")

TRIED = 72
"""Tokens of a trial: one that decodes, and a prompt of more than a tile."""
_APART = 0.1
"""How far results may be from plain ones, by their length: several roundings to bfloat16."""


def best_of(
    device: torch.device,
    *,
    numba: Callable[[], Backend],
    triton: Callable[[], Iterable[Backend]],
    runs: Callable[[Backend], bool],
    plain: Callable[[], Backend],
) -> Backend:
    """numba's kernel on a CPU; on a GPU the first of Triton's that `runs`; else torch's operators, `plain`. Factories
    import their back end, since neither package is always installed."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        return numba()
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        for backend in triton():
            if runs(backend):
                return backend
    return plain()


def gets_through(
    layers: str,
    backend: RecurrentBackend[Given_contra, Weights_contra],
    plain: RecurrentBackend[Given_contra, Weights_contra],
    given: Given_contra,
    weights: Weights_contra,
    new_cache: Callable[[], StateCache],
) -> bool:
    """Whether a back end computes a token and a prompt, together the TRIED tokens that are `given`, as a `plain` one
    does, in caches with room for two sequences: a package, a driver or a compiler may be too old, or missing, or make
    wrong code of a kernel. Raises OutOfMemoryError."""
    segments = [Segment(0, 1, 0, fresh=True, answers=1), Segment(1, TRIED, 1, fresh=True)]
    try:
        with torch.inference_mode():
            found, expected = (_results(each, segments, given, weights, new_cache()) for each in (backend, plain))
            apart = [_apart(one, other) for one, other in zip(found, expected, strict=True)]
    except torch.OutOfMemoryError:  # it says nothing about a back end
        raise
    except Exception as error:  # noqa: BLE001 - whatever it fails with, the next one may do
        _log.warning("a back end does not run here", layers=layers, backend=backend.name, cause=str(error)[:500])
        return False
    if not (right := all(each < _APART for each in apart)):
        _log.warning("a back end computes wrong results", layers=layers, backend=backend.name, apart=apart)
    return right


def _results(
    backend: RecurrentBackend[Given_contra, Weights_contra],
    segments: Sequence[Segment],
    given: Given_contra,
    weights: Weights_contra,
    cache: StateCache,
) -> list[Tensor]:
    """What comes out, and the states behind it."""
    return [backend.batch(segments).run(given, weights, cache), *cache.tensors]


def _apart(found: Tensor, expected: Tensor) -> float:
    """By the length of what is expected."""
    wide = expected.float()
    return float((found.float() - wide).norm() / wide.norm().clamp(min=1e-30))


def noise(*size: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """The same numbers each time, around nought."""
    random = torch.Generator().manual_seed(sum(size))
    return (scale * torch.randn(size, generator=random)).to(device, dtype)
