"""Chunks of a gated delta net by the flash-linear-attention library, if it is installed. Only half-precision types.

Convolutions, gates, norms and single tokens stay ours: transformers' step has no slots, so states would be copied out
and back for every token, and neither it nor causal-conv1d convolves packed sequences that have states already.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import gates


@dataclass(frozen=True, slots=True)
class Round:
    """Runs computed together, none of which continues another: `rows` of the batch; where each begins among them, int64
    [r + 1], on the device and on the host, where transformers needs it; `slots` int64 [r]; `fresh` bool [r, 1, 1, 1];
    the states of runs `copied` int64 [c] are also copied to slots `copies` int64 [c]."""

    rows: Tensor | slice
    starts: Tensor
    starts_on_host: Tensor
    slots: Tensor
    fresh: Tensor
    copied: Tensor
    copies: Tensor

    @classmethod
    def of(cls, runs: Sequence[Segment], device: torch.device) -> Round:
        """A round of these runs."""
        counts = [run.end - run.begin for run in runs]
        starts = torch.tensor([0, *itertools.accumulate(counts)])
        copied = [(number, run.copy) for number, run in enumerate(runs) if run.copy >= 0]

        def move(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64).to(device)

        rows: Tensor | slice = slice(runs[0].begin, runs[-1].end)
        if any(one.end != other.begin for one, other in itertools.pairwise(runs)):
            rows = move([row for run in runs for row in range(run.begin, run.end)])
        return cls(
            rows,
            starts.to(device),
            starts,
            move([run.slot for run in runs]),
            move([run.fresh for run in runs]).bool().view(-1, 1, 1, 1),
            move([number for number, _ in copied]),
            move([copy for _, copy in copied]),
        )


def rounds(runs: Sequence[Segment], device: torch.device) -> list[Round]:
    """Runs of one sequence follow each other, and so do their rounds.

    >>> runs = [Segment(0, 2, 5, fresh=True, copy=9), Segment(2, 4, 5, fresh=False), Segment(4, 6, 3, fresh=True)]
    >>> [(each.rows, each.slots.tolist()) for each in rounds(runs, torch.device("cpu"))]
    [(tensor([0, 1, 4, 5]), [5, 3]), (slice(2, 4, None), [5])]
    """
    found: list[list[Segment]] = []
    turn = 0
    for index, run in enumerate(runs):
        turn = turn + 1 if index and runs[index - 1].slot == run.slot else 0
        if turn == len(found):
            found.append([])
        found[turn].append(run)
    return [Round.of(each, device) for each in found]


class FlaRule:
    """`compute` is transformers' function."""

    def __init__(self, shape: GdnShape, compute: Callable[..., Any]) -> None:
        self._shape = shape
        self._compute = compute
        self._asks_host = "cu_seqlens_cpu" in inspect.signature(compute).parameters  # older ones wait for the device

    def run(
        self, out: Tensor, mixed: Tensor, given: GdnInput, weights: GdnWeights, recurrent: Tensor, each: Round
    ) -> None:
        """Reads mixed [n, channels], writes a round's rows of out [n, values], not yet normed, and its states."""
        shape, rows = self._shape, each.rows
        g, beta = gates(given.a[rows], given.b[rows], weights)
        query, key, value = mixed[rows].split([shape.keys, shape.keys, shape.values], dim=1)
        on_host = {"cu_seqlens_cpu": each.starts_on_host} if self._asks_host else {}
        read, states = self._compute(
            self._by_value_head(query),
            self._by_value_head(key),
            value.unflatten(1, (shape.value_heads, shape.value_dim)).unsqueeze(0),
            g=g.unsqueeze(0),
            beta=beta.to(out.dtype).unsqueeze(0),
            initial_state=recurrent[each.slots].masked_fill_(each.fresh, 0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=each.starts,
            **on_host,
        )
        out[rows] = read[0].flatten(1)
        recurrent[each.slots] = states
        if len(each.copies):
            recurrent[each.copies] = states[each.copied]

    def _by_value_head(self, x: Tensor) -> Tensor:  # older versions know no key heads that several value heads share
        heads: Tensor = x.unflatten(1, (self._shape.key_heads, self._shape.key_dim))
        return heads.repeat_interleave(self._shape.group, dim=1).unsqueeze(0)


def find(shape: GdnShape) -> FlaRule | None:
    """transformers' rule; None if it is missing, or was built for another torch or Triton."""
    try:
        compute = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, AttributeError):
        return None
    return FlaRule(shape, compute)
