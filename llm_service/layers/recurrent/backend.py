"""The interface of back ends for layers that read and write a state for each token: gated delta nets, Kimi Delta
Attention, Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache

CHUNK = 64
"""Tokens of a sequence computed at once. A sequence cut at multiples of these gives the same bits."""

Given_contra = TypeVar("Given_contra", contravariant=True)
"""The projections of n tokens."""
Weights_contra = TypeVar("Weights_contra", contravariant=True)


class RecurrentBatch(Protocol[Given_contra, Weights_contra]):
    """One flattened batch of n tokens, ready for every layer."""

    def run(self, given: Given_contra, weights: Weights_contra, cache: StateCache) -> Tensor:
        """→ [n, values]. `cache` has the `state` of a layer's shape: afterwards each segment's slot has the state
        behind its last token; it is not read if the segment is fresh."""
        ...


class RecurrentBackend(Protocol[Given_contra, Weights_contra]):
    """Makes batches; `name` is for logs."""

    name: str

    def batch(self, segments: Sequence[Segment]) -> RecurrentBatch[Given_contra, Weights_contra]:
        """Metadata of a step's segments, moved to the device. They are consecutive from token 0 on."""
        ...
