"""What back ends of torch's operators share: a step's runs and rounds of single tokens, which a batch computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from llm_service.layers.cache_spec import Segment
from llm_service.layers.recurrent.backend import RecurrentBatch
from llm_service.layers.recurrent.convolution import Steps
from llm_service.layers.recurrent.segments import FEW, split

Shape = TypeVar("Shape")
Given = TypeVar("Given")
Weights = TypeVar("Weights")


class RecurrentTorchBackend(Generic[Shape, Given, Weights]):
    """Makes batches for layers of one shape."""

    name = "torch"

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device

    def batch(self, segments: Sequence[Segment]) -> RecurrentBatch[Given, Weights]:
        """See `RecurrentBackend`."""
        runs, rounds = split(segments, FEW)
        return self.over(runs, Steps.of(rounds, self._device), segments)

    def over(
        self, runs: Sequence[Segment], rounds: Sequence[Steps], segments: Sequence[Segment], /
    ) -> RecurrentBatch[Given, Weights]:
        """A batch of these runs and then these rounds, of a step's segments."""
        raise NotImplementedError
