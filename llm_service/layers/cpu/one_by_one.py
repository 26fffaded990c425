"""Layers with recurrent states on a CPU: decoded tokens and their drafts by a kernel of numba's, chunks of prompts,
which come before them, by torch's products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array
from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.cpu import selection
from llm_service.layers.recurrent.backend import RecurrentBatch
from llm_service.layers.recurrent.segments import FEW, split
from llm_service.layers.recurrent.torch_backend import RecurrentTorchBackend


class Projected(Protocol):
    """What is projected from n tokens; `z` [n, values] gates what comes out, and has its type."""

    @property
    def z(self) -> Tensor: ...


Given = TypeVar("Given", bound=Projected)
Weights = TypeVar("Weights")
States = tuple[Array, Array]
"""States of the convolution, and recurrent ones, float32."""
Places = tuple[Array, Array, Array]
"""Of s sequences: `OneByOneSequences.rows`, where their states are in either of `States`, int64 [2, s], and `fresh`."""


@dataclass(frozen=True, slots=True)
class OneByOneSequences:
    """Sequences whose tokens are computed one by one: `rows` int64 [2, s], where they begin and end in the batch,
    `slots` int64 [s] of their states, and whether they are its first, bool [s]."""

    rows: Array
    slots: Tensor
    fresh: Array

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Segment]]) -> OneByOneSequences:
        """Of rounds of segments of one token, of which each sequence has the first in the first.

        >>> rounds = [[Segment(0, 1, 7, fresh=False), Segment(1, 2, 3, fresh=True)], [Segment(2, 3, 3, fresh=False)]]
        >>> OneByOneSequences.of(rounds).rows.tolist()
        [[0, 1], [1, 3]]
        """
        counts = Counter(step.slot for steps in rounds for step in steps)
        numbers = [(step.begin, step.begin + counts[step.slot], step.slot, step.fresh) for step in rounds[0]]
        begins, ends, slots, fresh = np.array(numbers, np.int64).T
        return cls(np.stack([begins, ends]), torch.from_numpy(slots.copy()), fresh.astype(bool))


Step = Callable[[Array, Given, Weights, States, Places], None]
"""Computes the rows of float32 [n, values] of tokens that decode, and updates the states."""


@dataclass(frozen=True, slots=True)
class OneByOneBatch(Generic[Given, Weights]):
    """`runs` computes chunks of prompts, `step` the tokens that decode."""

    runs: RecurrentBatch[Given, Weights] | None
    sequences: OneByOneSequences
    step: Step[Given, Weights]

    def run(self, given: Given, weights: Weights, cache: StateCache) -> Tensor:
        """See `RecurrentBatch`."""
        out = torch.empty(given.z.shape) if self.runs is None else self.runs.run(given, weights, cache).float()
        own, (convolution, recurrent) = self.sequences, cache.tensors
        before, places = convolution, own.slots
        if convolution.dtype != torch.float32:  # kernels have no other type: they get copies of those that they change
            before, places = convolution[own.slots].float(), torch.arange(len(own.slots))
        states = before.numpy(), recurrent.numpy()
        self.step(out.numpy(), given, weights, states, (own.rows, torch.stack([places, own.slots]).numpy(), own.fresh))
        if before is not convolution:
            convolution[own.slots] = before.to(convolution.dtype)
        return out.to(given.z.dtype)


class OneByOneBackend(Generic[Given, Weights]):
    """Makes batches for a kernel; while it is compiled, those of `plain`."""

    name = "numba"

    def __init__(self, plain: RecurrentTorchBackend[Any, Given, Weights]) -> None:
        self._plain = plain

    def batch(self, segments: Sequence[Segment]) -> RecurrentBatch[Given, Weights]:
        """See `RecurrentBackend`."""
        runs, rounds = split(segments, FEW)
        if not rounds or not selection.is_numba():
            return self._plain.batch(segments)
        before = self._plain.over(runs, (), segments) if runs else None
        return OneByOneBatch(before, OneByOneSequences.of(rounds), self.step_of(segments))

    def step_of(self, segments: Sequence[Segment]) -> Step[Given, Weights]:
        """The function that computes the decoded tokens of a step's segments."""
        raise NotImplementedError


def float_arrays(*tensors: Tensor) -> list[Array]:
    """float32, and each in order."""
    return [x.float().contiguous().numpy() for x in tensors]
