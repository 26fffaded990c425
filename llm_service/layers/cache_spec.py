"""What a layer keeps of sequences between steps: keys and values of every token, or one state of fixed size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.attention.backend import CAUSAL, AttentionKind, CacheShape, PagedChunk
from llm_service.plan import Chunk
from llm_service.settings import CacheDtype


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, in the blocks of a sequence's table; `kind` is how a layer attends to them. If
    `values_in_keys` is not 0, values are the first so many numbers of the keys."""

    heads: int
    kv_heads: int
    head_dim: int
    kind: AttentionKind = CAUSAL
    values_in_keys: int = 0


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Tensors of these shapes and types for each sequence, of any length, in the sequence's slot.

    A sequence cut at multiples of `chunk` tokens gives the same bits as the whole.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    chunk: int = 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)

    def new_cache(self, slots: int, device: torch.device) -> StateCache:
        """States for so many sequences, not initialised."""
        return StateCache([torch.empty(slots, *shape, dtype=dtype, device=device) for shape, dtype in self.tensors])


@dataclass(frozen=True, slots=True)
class SharedKV:
    """The layer uses the keys and values of an earlier `layer`, counted from 0, and attends alike."""

    layer: int


@dataclass(frozen=True, slots=True)
class IndexedKV:
    """Keys and values, the layer's own or an earlier one's, and an index key of so many numbers for every token, in the
    same blocks, by which it chooses the tokens that it attends to (`sparse_attention.index`). 0: it keeps none, and
    attends to what an earlier layer chose."""

    kv: PagedKV | SharedKV
    index_dim: int


CacheSpec = PagedKV | IndexedKV | SequenceState | SharedKV


def read_by(specs: Sequence[CacheSpec]) -> list[PagedKV | SequenceState]:
    """What each layer computes with: what it keeps, or what the layer keeps that it shares with. Layers of one kind of
    keys and values have one back end, whether they have index keys or not.

    >>> [spec.head_dim for spec in read_by([PagedKV(4, 2, 64), IndexedKV(PagedKV(4, 1, 128), 32), SharedKV(0)])]
    [64, 128, 64]
    """
    found: list[PagedKV | SequenceState] = []
    for spec in specs:
        own = spec.kv if isinstance(spec, IndexedKV) else spec
        found.append(found[own.layer] if isinstance(own, SharedKV) else own)
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the batch belong to the sequence whose state is in `slot`; `fresh`: they are its first.
    The state behind them is copied to slot `copy`, unless that is -1; the next segment may continue from it. `context`
    tokens of the sequence precede them. `answers` is as in `plan.Chunk`."""

    begin: int
    end: int
    slot: int
    fresh: bool
    copy: int = -1
    context: int = 0
    answers: int = 0

    @classmethod
    def of(
        cls, chunks: Sequence[Chunk | PagedChunk], slots: Sequence[int], passed: Sequence[tuple[int, int, int]] = ()
    ) -> list[Segment]:
        """Of a plan's chunks, which has a slot for each: one for each chunk, cut where a state is copied that it
        passes.

        >>> cuts = Segment.of([Chunk(7, 1, 0), Chunk(0, 150, 1)], [4, 6], [(1, 128, 9)])
        >>> [(each.begin, each.end, each.slot, each.fresh, each.copy) for each in cuts]
        [(0, 1, 4, False, -1), (1, 129, 6, True, 9), (129, 151, 6, False, -1)]
        >>> [each.answers for each in Segment.of([Chunk(0, 150, 0, answers=30)], [6], [(0, 64, 8), (0, 128, 9)])]
        [0, 8, 22]
        """
        segments, begin = list[Segment](), 0
        for number, (chunk, slot) in enumerate(zip(chunks, slots, strict=True)):
            own = sorted((place, copy) for owner, place, copy in passed if owner == number)
            first, prompt = 0, chunk.count - chunk.answers
            for place, copy in (*own, (chunk.count, -1)):
                fresh, context = chunk.context + first == 0, chunk.context + first
                answers = max(0, place - max(first, prompt))
                segments.append(cls(begin + first, begin + place, slot, fresh, copy, context, answers))
                first = place
            begin += chunk.count
        return segments


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's states, each tensor [slots, …]. A slot is never read before its sequence has written it: it may
    contain another sequence's numbers."""

    tensors: list[Tensor]

    def read(self, segment: Segment) -> list[Tensor]:
        """The state that a segment continues from, in the spec's shapes: zeros if a sequence begins."""
        if segment.fresh:
            return [torch.zeros_like(each[segment.slot]) for each in self.tensors]
        return [each[segment.slot] for each in self.tensors]

    def write(self, segment: Segment, state: Sequence[Tensor]) -> None:
        """Keeps the state after a segment's last token, and its copy."""
        for each, value in zip(self.tensors, state, strict=True):
            each[segment.slot] = value
            if segment.copy >= 0:
                each[segment.copy] = value

    def copy(self, source: int, target: int) -> None:
        """The state in one slot goes into another one as well."""
        for each in self.tensors:
            each[target] = each[source]


@dataclass(frozen=True, slots=True)
class IndexedCache:
    """One layer's keys and values, as `CacheShape.new_cache` has them of a layer, and its index keys, [blocks + 1,
    block_size, index_dim]."""

    kv: Tensor
    index: Tensor


LayerCache = Tensor | IndexedCache | StateCache
"""A layer's cache: its part of a paged cache, with index keys if it has any, or its states."""


def slot_bytes(specs: Sequence[CacheSpec]) -> int:
    """Bytes of one sequence's states over all layers; 0 if no layer has any."""
    return sum(spec.slot_bytes for spec in specs if isinstance(spec, SequenceState))


def cache_shapes(
    specs: Sequence[CacheSpec], blocks: int, block_size: int, kept: CacheDtype = CacheDtype.AUTO
) -> dict[PagedKV, CacheShape]:
    """The paged cache of each kind of keys and values, in 8 bits or not: that of all layers which are alike, and attend
    alike.

    >>> narrow, wide = PagedKV(4, 2, 64), PagedKV(4, 1, 128)
    >>> [shape.layers for shape in cache_shapes([narrow, wide, IndexedKV(narrow, 32)], 10, 16).values()]
    [2, 1]
    """
    own = (spec.kv if isinstance(spec, IndexedKV) else spec for spec in specs)
    counts = Counter(spec for spec in own if isinstance(spec, PagedKV))
    return {
        spec: CacheShape(
            layers,
            blocks,
            block_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.kind,
            spec.values_in_keys,
            kept,
        )
        for spec, layers in counts.items()
    }


def layer_caches(
    specs: Sequence[CacheSpec],
    shapes: Mapping[PagedKV, CacheShape],
    paged: Mapping[PagedKV, Tensor],
    slots: int,
    device: torch.device,
) -> list[LayerCache]:
    """Each layer's cache: its part of the `paged` cache of its kind, with these shapes; index keys and states for so
    many sequences are allocated here, in that type and on that device."""
    parts, made = {kind: iter(cache) for kind, cache in paged.items()}, list[LayerCache]()
    for spec, kind in zip(specs, read_by(specs), strict=True):
        if isinstance(kind, SequenceState):
            made.append(kind.new_cache(slots, device))
            continue
        own = spec.kv if isinstance(spec, IndexedKV) else spec
        kv = _kv_of(made[own.layer]) if isinstance(own, SharedKV) else next(parts[kind])
        if isinstance(spec, IndexedKV):
            keys = kv.new_empty(shapes[kind].blocks + 1, shapes[kind].block_size, spec.index_dim)
            made.append(IndexedCache(kv, keys))
        else:
            made.append(kv)
    return made


def _kv_of(cache: LayerCache) -> Tensor:
    assert not isinstance(cache, StateCache), "a layer with states has no keys and values"
    return cache.kv if isinstance(cache, IndexedCache) else cache


def block_bytes(
    specs: Sequence[CacheSpec], block_size: int, dtype: torch.dtype, kept: CacheDtype = CacheDtype.AUTO
) -> int:
    """Bytes that one block takes over all layers, of numbers of this type where keys and values are not in 8 bits, as
    index keys never are. Raises ValueError where no layer keeps any.

    >>> block_bytes([PagedKV(4, 2, 64), IndexedKV(PagedKV(4, 2, 64), 32)], 16, torch.bfloat16) // 16
    1088
    """
    total = sum(shape.block_bytes(dtype) for shape in cache_shapes(specs, 1, block_size, kept).values())
    if not total:
        raise ValueError("no layer has keys and values")
    return total + dtype.itemsize * block_size * sum(spec.index_dim for spec in specs if isinstance(spec, IndexedKV))
