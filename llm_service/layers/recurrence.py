"""What layers that read and write a state for each token have in common, whoever computes them: gated delta nets, Kimi
Delta Attention, Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from common.telemetry import log
from llm_service.layers.cache_spec import Segment, StateCache

_log = log.get("recurrence")

Given_contra = TypeVar("Given_contra", contravariant=True)
"""What is projected from n tokens."""
Weights_contra = TypeVar("Weights_contra", contravariant=True)


class RecurrentBatch(Protocol[Given_contra, Weights_contra]):
    """One flattened batch of n tokens, ready for every layer."""

    def run(self, given: Given_contra, weights: Weights_contra, cache: StateCache) -> Tensor:
        """→ [n, values]. `cache` is of the `state` of a layer's shape: each segment's slot has the state behind its
        last token afterwards, and is not read where the segment is fresh."""
        ...


class RecurrentBackend(Protocol[Given_contra, Weights_contra]):
    """Makes batches; `name` is what it is called in logs."""

    name: str

    def batch(self, segments: Sequence[Segment]) -> RecurrentBatch[Given_contra, Weights_contra]:
        """What a step's segments need to know, moved to the device. They follow one another from token 0 on."""
        ...


def gets_through(
    layers: str,
    backend: RecurrentBackend[Given_contra, Weights_contra],
    given: Given_contra,
    weights: Weights_contra,
    cache: StateCache,
) -> bool:
    """Whether a back end of such layers gets through a token and through a prompt of two, which are `given`, with room
    for two sequences: a package, a driver or a compiler may be too old, or not be there."""
    segments = [Segment(0, 1, 0, fresh=True, answers=1), Segment(1, 3, 1, fresh=True)]
    try:
        backend.batch(segments).run(given, weights, cache).sum().item()
    except Exception as error:  # noqa: BLE001 - whatever it fails with, the next one may do
        _log.warning("a back end does not run here", layers=layers, backend=backend.name, cause=str(error)[:500])
        return False
    return True
