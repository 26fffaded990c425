"""Attention on a CPU in float32, over keys and values in float32 or bfloat16, by kernels compiled by numba. Tokens that
decode come first, with their drafts; they read keys along their block tables. Keys of prompts are packed for products,
or, on a processor without the registers for these, left to torch, as everything is while kernels are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Array
from common.hardware import multiplies_tiles
from llm_service.families.sight import SpanRule
from llm_service.layers.attention.backend import (
    CAUSAL,
    AttentionBatch,
    AttentionKind,
    CacheShape,
    PagedChunk,
    Span,
    spans_of,
    within,
)
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cpu import bfloat16_decode, decode_attention, selection
from llm_service.layers.cpu.decode_attention import Decodes, decode
from llm_service.layers.cpu.pair_prefill import PairPrefillAttention
from llm_service.layers.cpu.prefill_attention import STRETCH, PrefillAttention, PrefillMetadata
from llm_service.layers.cpu.tile_prefill import TiledPrefillAttention

_CPU = torch.device("cpu")
_FEW = 16
"""Up to so many tokens of a prompt are computed as decoded tokens are, where chunks are not packed: for five, torch
takes twice as long, and starts threads of its own in each layer. Where chunks are packed, all are, so that a prompt's
bits do not depend on where it is cut."""


class NumbaBackend:
    """Makes batches for the kernels; `packs` says whether chunks are packed. A cache in bfloat16 is for processors with
    AVX512-BF16."""

    name = "numba"

    def __init__(self, shape: CacheShape, dtype: torch.dtype = torch.float32, *, packs: bool) -> None:
        self._shape = shape
        self._packs = packs
        short = dtype == torch.bfloat16
        decoding, self._prefill = (bfloat16_decode, in_pairs()) if short else (decode_attention, PrefillAttention)
        chunks = self._prefill.kernels if packs else ()
        self.kernels = frozenset({f"{decoding.__name__}:decode", *chunks})
        self._plain = TorchBackend(shape, _CPU)

    def warm_up(self, cache: Tensor, scales: Tensor | None = None) -> None:  # noqa: ARG002 - it reads no e4m3
        """See `WarmBackend`."""
        null_block = self._shape.null_block
        for count in (1, _FEW + 1):  # decoded, and not
            batch = self.batch([PagedChunk(0, count, [null_block] * count)])
            batch.attend(*self._shape.zeros(count, torch.float32, _CPU), cache)

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        """The batch of a plan."""
        if not selection.is_numba():
            return self._plain.batch(chunks, spans)
        decodes = self._decodes(chunks, spans)
        first, rest = chunks[:decodes], chunks[decodes:]
        ends = np.cumsum([chunk.count for chunk in first], dtype=np.int32)
        passed = sum(chunk.count for chunk in first)
        later = self._later(rest, [(begin - passed, end - passed) for begin, end in spans]) if rest else None
        if not first and later:
            return later
        widest = max(len(chunk.blocks) for chunk in first)
        table = np.zeros((len(first), widest), np.int32)
        for row, chunk in zip(table, first, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks
        lengths = np.array([chunk.context + chunk.count for chunk in first], np.int32)
        prompts = np.array([self._shape.kind.prompt_of(chunk) for chunk in first], np.int32)
        return _Batch(Decodes(table, lengths, ends, prompts), passed, later, self._shape.kind)

    def _decodes(self, chunks: Sequence[PagedChunk], spans: Sequence[Span]) -> int:
        """How many chunks come before the first that is not computed as one token is."""
        ends = list(itertools.accumulate(chunk.count for chunk in chunks))
        first = min((begin for begin, _ in spans), default=ends[-1])  # tokens of a span see what others do not
        beyond = self._shape.kind.sight.spans is SpanRule.WHOLE_PROMPTS
        for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            few = chunk.decodes or (not self._packs and chunk.count <= _FEW)
            alone = chunk.count == 1 and not (beyond and end > first)
            if not alone and not (few and end <= first):
                return index
        return len(chunks)

    def _later(self, chunks: Sequence[PagedChunk], spans: Sequence[Span]) -> AttentionBatch:
        shape, kind = self._shape, self._shape.kind
        sight, joined = kind.sight, kind.sight.spans is SpanRule.ALL_MEDIA
        apart = sight.answer_window > 0 and any(chunk.answered for chunk in chunks)  # an answer that is computed anew
        if not self._packs or apart or (spans and joined and sight.is_local):
            return self._plain.batch(chunks, spans)
        places = [_places(chunk, shape.block_size) for chunk in chunks]
        written = [all_[chunk.context :] for all_, chunk in zip(places, chunks, strict=True)]
        parts, count = list[_Part](), 0
        for chunk, own, all_ in zip(chunks, spans_of(chunks, spans), places, strict=True):
            joins = bool(own) and joined
            made = _joined(chunk, within(own, chunk.count), all_) if joins else [_alone(kind, chunk, own, all_)]
            parts += [_Part(part.queries + count, part.keys, part.seen) for part in made]
            count += chunk.count
        order, keys = np.concatenate([part.queries for part in parts]), np.concatenate([part.keys for part in parts])
        queries, known = [len(part.queries) for part in parts], [len(part.keys) for part in parts]
        metadata = PrefillMetadata.of(queries, known, [part.seen for part in parts])
        sizes = shape.kv_heads, shape.head_dim
        attention = self._prefill(metadata, keys, *sizes, scale=kind.scale, softcap=kind.softcap)
        moved = None if (np.diff(order) == 1).all() else torch.from_numpy(order)
        return _Packed(torch.from_numpy(np.concatenate(written)), attention, moved)


def in_pairs() -> type[PairPrefillAttention]:
    """How chunks over a cache in bfloat16 are computed on this processor."""
    return TiledPrefillAttention if multiplies_tiles() else PairPrefillAttention


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries of one sequence, int64 [n] of a batch, and where the keys are that any of them sees, int64 [m]: each sees
    those of them from `seen` int64 [n, 2] on, neither of which falls."""

    queries: Array
    keys: Array
    seen: Array


def _alone(kind: AttentionKind, chunk: PagedChunk, spans: Sequence[Span], places: Array) -> _Part:
    """A chunk by itself, whose keys, and those before them, are at these places."""
    unseen = kind.first_of(chunk, spans) // STRETCH * STRETCH
    return _Part(np.arange(chunk.count), places[unseen:], kind.seen(chunk, spans) - unseen)


def _joined(chunk: PagedChunk, joined: Array, places: Array) -> list[_Part]:
    """A chunk whose tokens `joined`, bool [count], see each other: first these, in both directions, then the others,
    causally."""
    own, before = places[chunk.context :], places[: chunk.context]
    others = np.flatnonzero(~joined)
    ends = np.cumsum(~joined)[joined] + chunk.context + joined.sum()
    keys = np.concatenate([own[joined], before, own[others]])
    parts = [_Part(np.flatnonzero(joined), keys, np.stack([np.zeros_like(ends), ends], axis=1))]
    if len(others):
        parts.append(_Part(others, places, CAUSAL.seen(chunk)[others]))
    return parts


@dataclass(frozen=True, slots=True)
class _Batch:
    """The first `count` tokens are those of `decodes`; `later` computes the rest."""

    decodes: Decodes
    count: int
    later: AttentionBatch | None
    kind: AttentionKind

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        count = self.count
        first = decode(query[:count], key[:count], value[:count], cache[0], cache[1], self.decodes, self.kind).flatten(
            1
        )
        if self.later is None:
            return first
        return torch.cat([first, self.later.attend(query[count:], key[count:], value[count:], cache)])


@dataclass(frozen=True, slots=True)
class _Packed:
    """`written` int64 is where the keys and values of the batch's tokens go; the queries are computed in this `order`,
    int64 [n], None: as they come."""

    written: Tensor
    attention: PrefillAttention
    order: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        keys, values = cache.flatten(1, 2)  # each [slots, kv_heads, head_dim]
        self.attention.write(self.written, key, value, keys, values)
        if self.order is None:
            return self.attention.attend(query, keys, values).flatten(1)
        out = torch.empty(query.shape, dtype=query.dtype)
        out[self.order] = self.attention.attend(query[self.order], keys, values)
        return out.flatten(1)


def _places(chunk: PagedChunk, block_size: int) -> Array:
    """Where a sequence's first context + count tokens are, int64.

    >>> _places(PagedChunk(2, 3, [5, 1]), 4)
    array([20, 21, 22, 23,  4])
    """
    starts = np.array(chunk.blocks, np.int64)[:, None] * block_size
    every: Array = (starts + np.arange(block_size)).reshape(-1)
    return every[: chunk.context + chunk.count]
