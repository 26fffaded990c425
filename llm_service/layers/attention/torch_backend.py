"""Attention by torch's own operators: for CPUs, and as a fallback.

Each chunk goes through `scaled_dot_product_attention`. If a sequence's blocks are consecutive, its keys are read in
place, else they are gathered first, which for a decode means the whole context for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.gpu.transfer import to_device
from llm_service.families.sight import SpanRule
from llm_service.layers.attention.backend import CacheShape, PagedChunk, Span, spans_of, within
from llm_service.layers.attention.int8_blocks import Int8Tokens
from llm_service.layers.attention.one_head import attend_to_one
from llm_service.layers.attention.scored import attend_by_scores
from llm_service.layers.sparse_attention.chosen_chunks import slots_of

_ROOM = 256 << 20
"""Most bytes of the scores of all heads at once on a GPU."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A chunk at batch positions [begin, end).

    `slots` are the slots of the tokens that any of it sees: a slice if they are consecutive, else an index. `mask` is
    bool [count, slots]; None if a single token, or a causal mask, suffices.
    """

    begin: int
    end: int
    slots: slice | Tensor
    mask: Tensor | None
    causal: bool

    @property
    def seen(self) -> int:
        """How many tokens any of them sees."""
        return self.slots.stop - self.slots.start if isinstance(self.slots, slice) else len(self.slots)

    def mask_of(self, keys: Tensor) -> Tensor | None:
        """The mask over what any of the tokens sees [m, …], including the causal one."""
        whole = keys.new_ones(len(keys), len(keys), dtype=torch.bool) if self.causal else None
        return self.mask if whole is None else whole.tril()


class TorchBackend:
    """Makes a segment of each chunk."""

    name = "torch"

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> TorchBatch:
        """The batch of a plan."""
        parts, begin = [], 0
        for chunk, own in zip(chunks, spans_of(chunks, spans), strict=True):
            parts.append(self._part(chunk, own, begin))
            begin += chunk.count
        numbers = [
            np.concatenate([part.written for part in parts]),
            *chain.from_iterable(part.numbers for part in parts),
        ]
        written, *there = to_device(numbers, self._device)
        moved = iter(there)
        segments = tuple(part.segment([next(moved) for _ in part.numbers]) for part in parts)
        return TorchBatch(written, segments, self._shape)

    def _part(self, chunk: PagedChunk, spans: Sequence[Span], begin: int) -> _Part:
        kind, last = self._shape.kind, chunk.context + chunk.count - 1
        positions = np.arange(kind.first_of(chunk, spans), last + 1)
        if kind.sight.answer_window and (behind := kind.first_seen(chunk.context)) > (prompt := chunk.prompt):
            positions = np.concatenate([positions[:prompt], positions[behind:]])
        slots = slots_of(chunk, self._shape.block_size)
        seen = slots[positions]
        row = slice(int(seen[0]), int(seen[-1]) + 1) if (np.diff(seen) == 1).all() else None
        several = chunk.count > 1
        mask = []
        if cut := several and (chunk.context > 0 or kind.first_seen(last) > 0 or bool(spans)):
            mask = [*kind.seen(chunk, spans).T, positions]
            mask += [within(spans, chunk.count).astype(np.uint8)] if kind.sight.spans is SpanRule.ALL_MEDIA else []
        prompt = kind.prompt_of(chunk)
        return _Part(begin, chunk.count, slots[chunk.context :], seen, row, tuple(mask), prompt, several and not cut)


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk on the host: the slots of its tokens, int64 [count], and of those that any of it sees, int64 [m],
    consecutive (`row`) or not. `mask` is what its mask is made of, if it has one: the positions [begin, end) that each
    token sees, int64 [count] each, those that any of it sees, and, if spans are joined, which tokens are in one. All
    tokens see the first `prompt` tokens."""

    begin: int
    count: int
    written: np.ndarray
    seen: np.ndarray
    row: slice | None
    mask: tuple[np.ndarray, ...]
    prompt: int
    causal: bool

    @property
    def numbers(self) -> list[np.ndarray]:
        """What its segment needs of this on the device."""
        return [*([self.seen] if self.row is None else []), *self.mask]

    def segment(self, numbers: list[Tensor]) -> _Segment:
        """The segment, given these numbers on the device."""
        slots = numbers.pop(0) if self.row is None else self.row
        mask: Tensor | None = None
        if numbers:
            begins, ends, positions, *joined = numbers
            begins, ends = begins.unsqueeze(1), ends.unsqueeze(1)
            mask = ((begins <= positions) | (positions < self.prompt)) & (positions < ends)
            for each in joined:
                mask[:, len(positions) - self.count :] |= (each.unsqueeze(1) & each).bool()
        return _Segment(self.begin, self.begin + self.count, slots, mask, self.causal)


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """`slots` int64 are those of the batch's tokens; `scales` as in `ScaledBatch`."""

    slots: Tensor
    segments: tuple[_Segment, ...]
    shape: CacheShape
    scales: Tensor | None = None

    def with_scales(self, scales: Tensor) -> TorchBatch:
        """See `ScaledBatch`."""
        return replace(self, scales=scales)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        if self.shape.values_in_keys:
            return self._attend_to_one(query, self.store(key, value, cache)[0][:, 0])
        keys, values = (self._store_int8 if self.shape.int8 else self.store)(key, value, cache)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scale, softcap = self.shape.softmax_scale, self.shape.kind.softcap
        for segment in self.segments:
            here = slice(segment.begin, segment.end)
            key, value = (self._read(kept, segment, part, query.dtype) for part, kept in enumerate((keys, values)))
            if softcap is not None:
                mask = segment.mask_of(key)
                out[here] = attend_by_scores(query[here], key, value, mask, scale=scale, softcap=softcap)
                continue
            if segment.mask is not None and query.device.type == "cuda":
                attend_by_mask(out[here], query[here], key, value, segment.mask, scale)
                continue
            attended = functional.scaled_dot_product_attention(
                query[here].transpose(0, 1).unsqueeze(0),
                key.transpose(0, 1).unsqueeze(0),
                value.transpose(0, 1).unsqueeze(0),
                attn_mask=segment.mask,
                is_causal=segment.causal,
                scale=scale,
                enable_gqa=True,
            )
            out[here] = attended.squeeze(0).transpose(0, 1)
        return out.flatten(1)

    def _read(self, kept: Tensor | Int8Tokens, segment: _Segment, part: int, dtype: torch.dtype) -> Tensor:
        """The keys that any of a segment's tokens sees, or the values, by the `part` that they are of a cache."""
        seen = kept[segment.slots]
        return seen.to(dtype) if self.scales is None else (seen.float() * self.scales[part].unsqueeze(1)).to(dtype)

    def _store_int8(self, key: Tensor, value: Tensor, cache: Tensor) -> tuple[Int8Tokens, Int8Tokens]:
        """The same in 8 bits."""
        keys, values = map(self.shape.int8_tokens, cache)
        keys.write(self.slots, key)
        values.write(self.slots, value)
        return keys, values

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the batch's keys and values, as in `attend`, into one layer's cache → all of its keys [slots,
        kv_heads, head_dim], and values [slots, kv_heads, value_dim]."""
        keys, values = (each.flatten(0, 1) for each in self.shape.split(cache))
        if self.shape.fp8:  # torch cannot index these on CPUs
            for part, (kept, given) in enumerate(((keys, key), (values, value))):
                scaled = given if self.scales is None else given.float() / self.scales[part].unsqueeze(1)
                kept.view(torch.uint8).index_copy_(0, self.slots, saturated(scaled).view(torch.uint8))
            return keys, values
        keys.index_copy_(0, self.slots, key.to(keys.dtype))
        if not self.shape.values_in_keys:
            values.index_copy_(0, self.slots, value.to(values.dtype))
        return keys, values

    def _attend_to_one(self, query: Tensor, keys: Tensor) -> Tensor:
        """With values that lie within keys [slots, head_dim]."""
        out = query.new_empty(*query.shape[:2], self.shape.value_dim)
        for segment in self.segments:
            here, seen = slice(segment.begin, segment.end), keys[segment.slots]
            mask, kind = segment.mask_of(seen), self.shape.kind
            attend_to_one(out[here], query[here], seen, mask, self.shape.softmax_scale, kind.softcap)
        return out.flatten(1)


def saturated(x: Tensor) -> Tensor:
    """Numbers as e4m3: those that are too large become its largest.

    >>> saturated(torch.tensor([1.05, -600.0])).tolist()
    [1.0, -448.0]
    """
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.float().clamp(-most, most).to(torch.float8_e4m3fn)


def attend_by_mask(out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> None:
    """Fills out [n, heads, depth] as `functional.scaled_dot_product_attention` does for query [n, heads, width], key
    [m, kv_heads, width] and value [m, kv_heads, depth], with mask bool [n, m]. For grouped heads with a mask torch
    keeps all scores on GPUs; so keys are repeated for each head, for its other kernel, and only so many queries are
    computed at a time that their scores would fit as well."""
    heads, total = query.shape[1], len(key)
    keys, values = (
        each.repeat_interleave(heads // each.shape[1], dim=1).transpose(0, 1).unsqueeze(0) for each in (key, value)
    )
    rows = max(1, _ROOM // (4 * heads * total))
    for begin in range(0, len(query), rows):
        here = slice(begin, begin + rows)
        queries = query[here].transpose(0, 1).unsqueeze(0)
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[here], scale=scale)
        out[here] = attended.squeeze(0).transpose(0, 1)
