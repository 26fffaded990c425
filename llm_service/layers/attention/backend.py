"""The decoder's interface to attention, for all back ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from llm_service.families.sight import ALL_BEFORE, Sight, SpanRule
from llm_service.layers.attention.int8_blocks import SCALE_BYTES, Int8Tokens
from llm_service.settings import CacheDtype


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How layers attend. Products of queries and keys are multiplied by `scale`, None: by head_dim^-0.5. Scores are
    drawn below `softcap` by its hyperbolic tangent before anything is hidden, None: they are as they are. Kernels know
    one window of a `sight`, for answers alone or for all."""

    sight: Sight = ALL_BEFORE
    scale: float | None = None
    softcap: float | None = None

    def softmax_scale(self, head_dim: int) -> float:
        """The factor of products of queries and keys."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def first_seen(self, position: int) -> int:
        """The first position that a token sees.

        >>> near, cut = AttentionKind(Sight(window=4)), AttentionKind(Sight(chunk=4))
        >>> AttentionKind().first_seen(9), near.first_seen(9), near.first_seen(2)
        (0, 6, 0)
        >>> cut.first_seen(7), cut.first_seen(8)
        (4, 8)
        """
        reach, chunk = self.sight.reach, self.sight.chunk
        first = max(0, position + 1 - reach) if reach else 0
        return max(first, position // chunk * chunk) if chunk else first

    def first_of(self, chunk: PagedChunk, spans: Sequence[Span]) -> int:
        """The first position that any token of a chunk sees, whose spans these are.

        >>> whole = AttentionKind(Sight(window=4, spans=SpanRule.WHOLE_PROMPTS))
        >>> whole.first_of(PagedChunk(9, 5, []), []), whole.first_of(PagedChunk(9, 5, []), [(0, 4)])
        (6, 0)
        """
        whole = self.sight.spans is SpanRule.WHOLE_PROMPTS and spans
        return 0 if whole or self.sight.answer_window else self.first_seen(chunk.context)

    def prompt_of(self, chunk: PagedChunk) -> int:
        """How many first tokens of a chunk's sequence all later tokens see, whatever the window."""
        return chunk.prompt if self.sight.answer_window else 0

    def seen(self, chunk: PagedChunk, spans: Sequence[Span] = ()) -> np.ndarray:
        """The positions [begin, end) that each token of a chunk sees, int64 [count, 2], of an answer beside those of
        the prompt, if these are seen; spans are those of the chunk, each by itself.

        >>> near = AttentionKind(Sight(window=4, spans=SpanRule.EVERYWHERE))
        >>> near.seen(PagedChunk(2, 5, []), [(1, 4)]).T.tolist()
        [[0, 0, 1, 2, 3], [3, 6, 6, 6, 7]]
        >>> beyond = AttentionKind(Sight(window=2, spans=SpanRule.BEYOND_WINDOWS))
        >>> beyond.seen(PagedChunk(2, 5, []), [(1, 4)]).T.tolist()
        [[1, 2, 3, 3, 5], [3, 6, 6, 6, 7]]
        >>> cut = AttentionKind(Sight(chunk=4, spans=SpanRule.EVERYWHERE))
        >>> cut.seen(PagedChunk(2, 5, []), [(1, 4)]).T.tolist()
        [[0, 0, 4, 4, 4], [3, 4, 6, 6, 7]]
        >>> AttentionKind(Sight(answer_window=2)).seen(PagedChunk(2, 5, [], answered=3)).T.tolist()
        [[0, 0, 3, 4, 5], [3, 4, 5, 6, 7]]
        """
        places = np.arange(chunk.context, chunk.context + chunk.count, dtype=np.int64)
        sight, reach = self.sight, self.sight.reach
        begins = np.maximum(places + 1 - reach, 0) if reach else np.zeros_like(places)
        begins[places < self.prompt_of(chunk)] = 0
        seen = np.stack([begins, places + 1], axis=1)
        for begin, end in spans:
            seen[begin:end, 1] = chunk.context + end
            if sight.spans is SpanRule.BEYOND_WINDOWS:
                seen[begin:end, 0] = np.minimum(seen[begin:end, 0], chunk.context + begin)
            if sight.spans is SpanRule.WHOLE_PROMPTS:
                seen[begin:end, 0] = 0
        if sight.chunk:
            firsts = places // sight.chunk * sight.chunk
            seen = np.stack([np.maximum(seen[:, 0], firsts), np.minimum(seen[:, 1], firsts + sight.chunk)], axis=1)
        return seen


CAUSAL = AttentionKind()

Span = tuple[int, int]
"""Tokens [begin, end) that see each other."""


def spans_of(chunks: Sequence[PagedChunk], spans: Sequence[Span]) -> list[list[Span]]:
    """Of each chunk its own, counted from its first token, of those of the whole batch.

    >>> spans_of([PagedChunk(9, 1, []), PagedChunk(0, 8, [])], [(3, 6)])
    [[], [(2, 5)]]
    """
    found, first = [], 0
    for chunk in chunks:
        last = first + chunk.count
        found.append([(begin - first, end - first) for begin, end in spans if first <= begin and end <= last])
        first = last
    return found


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One rank's KV cache. It has one additional block, the `null_block`, which padding is written to. `kind` is how
    its layers attend. If `values_in_keys` is not 0, it has keys of one head only, whose first so many numbers are the
    values: latent attention, whose projections are outside the cache. `kept`: the type of keys and values; for 8 bits
    see `int8_blocks`."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    kind: AttentionKind = CAUSAL
    values_in_keys: int = 0
    kept: CacheDtype = CacheDtype.AUTO

    @property
    def int8(self) -> bool:
        """Keys and values have 8 bits, and scales."""
        return self.kept is CacheDtype.INT8

    @property
    def fp8(self) -> bool:
        """They are e4m3."""
        return self.kept is CacheDtype.FP8

    @property
    def softmax_scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.kind.softmax_scale(self.head_dim)

    @property
    def null_block(self) -> int:
        """The number of the block that no sequence holds."""
        return self.blocks

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, of numbers of this type where they are not in 8 bits.

        >>> plain = CacheShape(layers=2, blocks=9, block_size=16, heads=4, kv_heads=2, head_dim=64)
        >>> [replace(plain, kept=kept).block_bytes(torch.bfloat16) for kept in CacheDtype]
        [16384, 8704, 8192]
        """
        head_bytes = self.head_dim + SCALE_BYTES if self.int8 else self.head_dim * self.stored(dtype).itemsize
        return self.tensors * self.layers * self.kv_heads * self.block_size * head_bytes

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The type that numbers of this type are stored as, if they have no scales."""
        return torch.float8_e4m3fn if self.fp8 else dtype

    @property
    def tensors(self) -> int:
        """Keys and values of a layer, or keys alone."""
        return 1 if self.values_in_keys else 2

    @property
    def value_dim(self) -> int:
        """Width of a value, and of a head's output."""
        return self.values_in_keys or self.head_dim

    def split(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's cache → its keys [blocks + 1, block_size, kv_heads, head_dim] and values [blocks + 1, block_size,
        kv_heads, value_dim], which may be part of the keys."""
        return cache[0], cache[-1][..., : self.value_dim]

    def int8_tokens(self, part: Tensor) -> Int8Tokens:
        """One layer's keys, or its values, int8 [blocks + 1, bytes of a block], by slot."""
        return Int8Tokens(part, self.block_size, self.kv_heads, self.head_dim)

    def new_cache(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A cache, [layers, tensors, blocks + 1, block_size, kv_heads, head_dim]; tensor 0 is keys, 1 is values. In 8
        bits it is int8, [layers, tensors, blocks + 1, bytes of a block].

        On a CPU memory is allocated as it fills: our kernels read nothing that was not written. On a GPU it is zeroed,
        since flash-attn multiplies values behind a sequence's end by zero, which would keep NaNs.
        """
        make = torch.empty if device.type == "cpu" else torch.zeros
        parts = self.layers, self.tensors, self.blocks + 1
        if self.int8:
            own = self.block_bytes(dtype) // (self.layers * self.tensors)
            return make((*parts, own), dtype=torch.int8, device=device)
        return make((*parts, self.block_size, self.kv_heads, self.head_dim), dtype=self.stored(dtype), device=device)

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `count` tokens, laid out as a layer's are."""
        heads = torch.zeros(count, self.heads + 2 * self.kv_heads, self.head_dim, dtype=dtype, device=device)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return query, key, key[..., : self.values_in_keys] if self.values_in_keys else value


@dataclass(frozen=True, slots=True)
class PagedChunk:
    """`count` tokens of one sequence, after `context` tokens that are in the KV cache: the next ones of a flattened
    batch. `blocks` is the sequence's block table, integers, long enough for context + count tokens. `decodes`,
    `answers` and `answered` are as in `plan.Chunk`."""

    context: int
    count: int
    blocks: Sequence[int] | np.ndarray
    decodes: bool = False
    answers: int = 0
    answered: int = 0

    @property
    def prompt(self) -> int:
        """How many tokens of the sequence, up to the last one here, are a prompt's."""
        return self.context + self.count - self.answered


def runs_of(there: np.ndarray, first: int = 0) -> list[Span]:
    """Runs of places in bool [n], counted from `first` on.

    >>> runs_of(np.array([True, True, False, True]), 10)
    [(10, 12), (13, 14)]
    """
    edges = np.flatnonzero(np.diff(there, prepend=False, append=False)) + first
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def within(spans: Sequence[Span], count: int) -> np.ndarray:
    """Which of a chunk's tokens are in one of its spans, bool [count].

    >>> within([(0, 1), (2, 4)], 5).tolist()
    [True, False, True, True, False]
    """
    found = np.zeros(count, np.bool_)
    for begin, end in spans:
        found[begin:end] = True
    return found


def parts_at(chunks: Sequence[PagedChunk], places: np.ndarray) -> list[PagedChunk]:
    """Of a batch's chunks the tokens at these places, which ascend: each stretch of them as a chunk, behind all that is
    before it.

    >>> whole = [PagedChunk(9, 2, [], decodes=True), PagedChunk(4, 3, []), PagedChunk(0, 8, [])]
    >>> [(part.context, part.count, part.decodes) for part in parts_at(whole, np.array([0, 1, 6, 11, 12]))]
    [(9, 2, True), (1, 1, False), (6, 2, False)]
    >>> [part.prompt for part in parts_at([PagedChunk(4, 5, [], answered=3)], np.array([0, 3]))]
    [5, 6]
    """
    found, first = [], 0
    for chunk in chunks:
        own = places[(places >= first) & (places < first + chunk.count)] - first
        stretches = np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else []
        more = ((chunk.context + int(each[0]), len(each)) for each in stretches)
        found += [
            replace(chunk, context=context, count=count, answered=max(0, context + count - chunk.prompt))
            for context, count in more
        ]
        first += chunk.count
    return found


class AttentionBatch(Protocol):
    """One flattened batch of n tokens, ready to be attended to in every layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """Writes the batch's keys and values into one layer's cache, then attends within each sequence, as the cache's
        kind says.

        query [n, heads, head_dim]; key [n, kv_heads, head_dim], value [n, kv_heads, value_dim]; cache [tensors, blocks
        + 1, block_size, kv_heads, head_dim] → [n, heads · value_dim]. Of each, one token's numbers lie together, in
        order; values that are kept within keys are theirs.
        """
        ...


class ScaledBatch(AttentionBatch, Protocol):
    """One over keys and values of e4m3."""

    def with_scales(self, scales: Tensor) -> AttentionBatch:
        """The same batch for a layer whose cached numbers have these factors, float32 [2, kv_heads]: keys, then
        values."""
        ...


@runtime_checkable
class WarmBackend(Protocol):
    """A back end that compiles kernels at their first use."""

    def warm_up(self, cache: Tensor, scales: Tensor | None = None) -> None:
        """Uses all kernels once, over one layer's cache, without changing anything in use; `scales` as in
        `ScaledBatch`."""
        ...


@runtime_checkable
class NumbaCompiled(Protocol):
    """A back end with numba kernels: their names, as in `common.cpu.jit.find`."""

    kernels: frozenset[str]


class AttentionBackend(Protocol):
    """Makes batches over the paged cache that `CacheShape.new_cache` gives; `name` is its name among the options."""

    name: str

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        """Metadata of a batch's chunks, moved to the device. Tokens of each span, [begin, end) in the batch and within
        one chunk, see each other."""
        ...


MakesBackend: TypeAlias = Callable[[CacheShape], AttentionBackend]
