"""Gated delta nets and Kimi Delta Attention by torch's operators that follow `RecurrentMetadata`, as kernels do:
graphs are tried with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.gdn.layer import GatedDeltaNet
from llm_service.layers.gdn.torch_backend import TorchBackend as TorchDeltas
from llm_service.layers.kda.layer import KimiDeltaAttention
from llm_service.layers.kda.torch_backend import TorchBackend as TorchKimi
from llm_service.layers.mixer import CachedPart, StateBackend
from llm_service.layers.recurrent.metadata import RecurrentMetadata

CPU = torch.device("cpu")


def plain_states(mixer: CachedPart) -> StateBackend:
    """What follows metadata for a mixer: `PlainStates`, or torch's operators where these do."""
    if isinstance(mixer, GatedDeltaNet):
        return PlainStates(TorchDeltas(mixer.shape, CPU))
    if isinstance(mixer, KimiDeltaAttention):
        return PlainStates(TorchKimi(mixer.shape, CPU))
    return mixer.state_backend()


class PlainStates:
    """A back end that reads its metadata anew at each use."""

    def __init__(self, backend: StateBackend) -> None:
        self._torch = backend

    def batch(self, segments: Sequence[Segment]) -> Any:
        return self._torch.batch(segments)

    def padding(self, tokens: int, sequences: int, *, decodes_only: bool) -> RecurrentMetadata:
        return RecurrentMetadata.padding(tokens, sequences, CPU, decodes_only=decodes_only)

    def over(self, metadata: RecurrentMetadata) -> PlainStatesBatch:
        return PlainStatesBatch(self._torch, metadata)


@dataclass(frozen=True)
class PlainStatesBatch:
    torch: StateBackend
    metadata: RecurrentMetadata

    def run(self, given: Any, weights: Any, cache: StateCache) -> Tensor:
        """Rows of padding are not numbers."""
        segments = _segments(self.metadata)
        computed = self.torch.batch(segments).run(given, weights, cache)
        out = torch.full_like(computed, torch.nan)
        for each in segments:
            out[each.begin : each.end] = computed[each.begin : each.end]
        return out


def _segments(metadata: RecurrentMetadata) -> list[Segment]:
    found = []
    tiles = metadata.tiles.tolist()
    for number, (begin, end, slot, fresh, first) in enumerate(metadata.runs.tolist()):
        own = [tile for tile in tiles[max(0, first) :] if tile[0] == number and slot >= 0]
        for index, (_, at, copy) in enumerate(own):
            last = own[index + 1][1] if index + 1 < len(own) else end
            found.append(Segment(at, last, slot, bool(fresh) and at == begin, copy))
    found += [Segment(row, row + 1, slot, bool(fresh)) for row, slot, fresh in metadata.steps.tolist() if slot >= 0]
    return found
