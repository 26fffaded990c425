"""What layers that read and write a state for each token have in common, whoever computes them: gated delta nets, Kimi
Delta Attention, Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache

CHUNK = 64
"""Tokens of a sequence that are computed at once. A sequence that is cut at multiples of these gives the same bits."""

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
