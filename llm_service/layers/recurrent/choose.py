"""Chooses the back end of layers that read and write a state for each token."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from common.telemetry import log
from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.recurrent.backend import Given_contra, RecurrentBackend, Weights_contra

_log = log.get("recurrence")

Backend = TypeVar("Backend")


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
    given: Given_contra,
    weights: Weights_contra,
    cache: StateCache,
) -> bool:
    """Whether a back end computes a token and a prompt of two tokens, which are `given`, with room for two sequences: a
    package, a driver or a compiler may be too old, or missing."""
    segments = [Segment(0, 1, 0, fresh=True, answers=1), Segment(1, 3, 1, fresh=True)]
    try:
        backend.batch(segments).run(given, weights, cache).sum().item()
    except Exception as error:  # noqa: BLE001 - whatever it fails with, the next one may do
        _log.warning("a back end does not run here", layers=layers, backend=backend.name, cause=str(error)[:500])
        return False
    return True
