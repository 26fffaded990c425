"""What a layer keeps of sequences between steps: keys and values of every token, or one state of a fixed size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBatch, CacheShape
from llm_service.plan import StepPlan


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, in the blocks of a sequence's table. All such layers of a model are alike."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Tensors of these shapes and types for each sequence, however long it is. They lie in the sequence's slot."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)

    def new_cache(self, slots: int, device: torch.device) -> StateCache:
        """States for so many sequences; what is in them means nothing until it is written."""
        return StateCache([torch.empty(slots, *shape, dtype=dtype, device=device) for shape, dtype in self.tensors])


CacheSpec = PagedKV | SequenceState


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the batch belong to the sequence whose state is in `slot`; `fresh`: they are its first."""

    begin: int
    end: int
    slot: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's states, each tensor [slots, …]. A slot is never read before its sequence has written it: whoever had
    it before has left numbers there."""

    tensors: list[Tensor]

    def read(self, segment: Segment) -> list[Tensor]:
        """The state that a segment goes on with, of the spec's shapes: zeros where a sequence begins."""
        if segment.fresh:
            return [torch.zeros_like(each[segment.slot]) for each in self.tensors]
        return [each[segment.slot] for each in self.tensors]

    def write(self, segment: Segment, state: Sequence[Tensor]) -> None:
        """Keeps the state after a segment's last token."""
        for each, value in zip(self.tensors, state, strict=True):
            each[segment.slot] = value


LayerCache = Tensor | StateCache
"""What a layer is handed: its part of the paged cache, or its states."""


@dataclass(frozen=True, slots=True)
class HybridBatch:
    """The batch of a model that has layers of both kinds: an attention batch, and segments for layers with states."""

    attention: AttentionBatch
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, plan: StepPlan, attention: AttentionBatch) -> HybridBatch:
        """A plan's batch; the plan names a slot for each chunk."""
        segments, begin = [], 0
        for chunk, slot in zip(plan.chunks, plan.slots, strict=True):
            segments.append(Segment(begin, begin + chunk.count, slot, fresh=chunk.context == 0))
            begin += chunk.count
        return cls(attention, tuple(segments))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        return self.attention.attend(query, key, value, cache)


def cache_shape(specs: Sequence[CacheSpec], blocks: int, block_size: int) -> CacheShape:
    """The shape of the paged cache of all layers that have one. Raises ValueError unless these are alike."""
    paged = [spec for spec in specs if isinstance(spec, PagedKV)]
    if len(set(paged)) != 1:
        raise ValueError("the layers with keys and values are not alike, or there are none")
    return CacheShape(len(paged), blocks, block_size, paged[0].heads, paged[0].kv_heads, paged[0].head_dim)


def slot_bytes(specs: Sequence[CacheSpec]) -> int:
    """Bytes of one sequence's states over all layers; 0 where no layer has any."""
    return sum(spec.slot_bytes for spec in specs if isinstance(spec, SequenceState))


def new_caches(specs: Sequence[CacheSpec], paged: Tensor, slots: int) -> list[LayerCache]:
    """A cache for each layer, in order: its part of `paged`, as `CacheShape.new_cache` gives it, or new states."""
    parts = iter(paged)
    return [next(parts) if isinstance(spec, PagedKV) else spec.new_cache(slots, paged.device) for spec in specs]
