"""What back ends with our own Triton kernels share: batches follow metadata, which can be refilled for a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from llm_service.layers.cache_spec import Segment

Metadata = TypeVar("Metadata")
Metadata_co = TypeVar("Metadata_co", covariant=True)
Batch_co = TypeVar("Batch_co", covariant=True)


class MakesMetadata(Protocol[Metadata_co]):
    """A class of metadata."""

    def of(self, segments: Sequence[Segment], device: torch.device, /) -> Metadata_co:
        """That of a step's segments."""
        ...

    def padding(self, tokens: int, sequences: int, device: torch.device, /, *, decodes_only: bool) -> Metadata_co:
        """Room for any segments of so many tokens of so many sequences."""
        ...


class RecurrentKernelBackend(Generic[Metadata, Batch_co]):
    """Makes batches over metadata of one kind."""

    name = "triton"

    def __init__(self, metadata: MakesMetadata[Metadata], device: torch.device) -> None:
        self._metadata, self._device = metadata, device

    def batch(self, segments: Sequence[Segment]) -> Batch_co:
        """See `RecurrentBackend`."""
        return self.over(self._metadata.of(segments, self._device))

    def padding(self, tokens: int, sequences: int, *, decodes_only: bool) -> Metadata:
        """See `StableStateBackend`."""
        return self._metadata.padding(tokens, sequences, self._device, decodes_only=decodes_only)

    def over(self, metadata: Metadata) -> Batch_co:
        """See `StableStateBackend`."""
        raise NotImplementedError
