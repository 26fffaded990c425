"""Attention by per-layer rules: windows, soft caps, sinks, spans whose tokens see each other. Computed by torch's
operators, chunk by chunk, for models that our kernels do not support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from common.gpu.transfer import to_device
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention.backend import CAUSAL, AttentionKind, CacheShape, PagedChunk, Span
from llm_service.layers.attention.one_head import attend_to_one
from llm_service.layers.attention.scored import attend_by_scores, softmax_with_sinks
from llm_service.layers.sparse_attention.chosen_chunks import slots_of
from llm_service.layers.sparse_attention.index import ROOM, Chosen, IndexQuery, choose, keep, mask_of


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends: its kind, whose sight may have windows of both sorts, without spans. `sinks` [heads] are
    scores without values, whose share is lost. `chosen`: what the tokens of each chunk see, if an index has chosen it;
    spans do not apply then."""

    kind: AttentionKind = CAUSAL
    sinks: Tensor | None = None
    chosen: tuple[Chosen, ...] | None = None


PLAIN = AttentionRule()


@dataclass(frozen=True, slots=True)
class _Segment:
    """A chunk at batch positions [begin, end); `slots` int64 [context + count] are the slots of the tokens that it
    sees. `spans` are those of its positions, [begin, end), that see each other by `rule`; the span of a whole prompt
    also sees what was computed of the prompt before. `prompt` is the number of prompt tokens of the sequence."""

    begin: int
    end: int
    slots: Tensor
    spans: tuple[Span, ...]
    rule: SpanRule = SpanRule.EVERYWHERE
    prompt: int = 0

    def mask(self, sight: Sight) -> Tensor:
        """bool [count, context + count]: which tokens see which in a layer with that sight."""
        sight = sight.with_spans(self.rule)
        total, count = len(self.slots), self.end - self.begin
        keys = torch.arange(total, device=self.slots.device)
        queries = keys[total - count :].unsqueeze(1)
        seen = keys <= queries
        spans = () if sight.spans is SpanRule.NOWHERE else self.spans
        runs = [slice(first - self.begin, last - self.begin) for first, last in spans]
        for here in runs:
            seen[here, total - count + here.start : total - count + here.stop] = True
        if sight.window:
            seen &= keys > queries - sight.window
        for here in runs if sight.spans is SpanRule.BEYOND_WINDOWS else ():
            seen[here, total - count + here.start : total - count + here.stop] = True
        if sight.chunk:
            seen &= keys // sight.chunk == queries // sight.chunk
        if sight.answer_window:
            seen &= (keys < self.prompt) | (queries < self.prompt) | (keys > queries - sight.answer_window)
        for here in runs if sight.spans is SpanRule.WHOLE_PROMPTS else ():
            seen[here, : total - count + here.stop] = True
        if sight.spans is SpanRule.ALL_MEDIA:
            media = torch.zeros(count, dtype=torch.bool, device=seen.device)
            for here in runs:
                media[here] = True
            seen[:, total - count :] |= media.unsqueeze(1) & media
        return seen


class GeneralBackend:
    """Makes a segment of each chunk."""

    name = "general"

    def __init__(self, shape: CacheShape, device: torch.device, rule: SpanRule = SpanRule.EVERYWHERE) -> None:
        self._block_size, self._device, self._rule = shape.block_size, device, rule

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> GeneralBatch:
        """A plan's batch; tokens of each span, [begin, end) in the batch, see each other."""
        segments, begin = [], 0
        every = to_device([slots_of(chunk, self._block_size) for chunk in chunks], self._device)
        for chunk, slots in zip(chunks, every, strict=True):
            end = begin + chunk.count
            own = tuple(span for span in spans if begin <= span[0] and span[1] <= end)
            prompt = chunk.context + chunk.count - chunk.answered
            segments.append(_Segment(begin, end, slots, own, self._rule, prompt))
            begin = end
        return GeneralBatch(tuple(segments))


@dataclass(frozen=True, slots=True)
class GeneralBatch:
    """See `AttentionBatch`."""

    segments: tuple[_Segment, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
        """As `AttentionBatch.attend`, by a rule → [n, heads · value_dim]. Keys and values may be narrower than the
        cache's heads, which are padded with zeros. Values that are part of keys are their first numbers."""
        keys, values = cache[0].flatten(0, 1), cache[-1].flatten(0, 1)  # each [slots, kv_heads, head_dim]
        width, depth = key.shape[-1], value.shape[-1]
        out = query.new_empty(*query.shape[:2], depth)
        kind, every = rule.kind, rule.chosen or [None] * len(self.segments)
        for part, chosen in zip(self.segments, every, strict=True):
            here, new = slice(part.begin, part.end), part.slots[len(part.slots) - (part.end - part.begin) :]
            keys[new, :, :width], values[new, :, :depth] = key[here], value[here]
            if chosen is not None:
                attend_to_chosen(out[here], query[here], keys, values, part.slots, chosen, kind.scale, rule.sinks)
                continue
            mask = part.mask(kind.sight)
            if len(cache) == 1 and kind.softcap is None and rule.sinks is None:
                attend_to_one(out[here], query[here], keys[part.slots, 0, :width], mask, kind.softmax_scale(width))
                continue
            seen = keys[part.slots, :, :width], values[part.slots, :, :depth]
            out[here] = _attend(query[here], *seen, mask, rule)
        return out.flatten(1)

    def choose(self, asked: IndexQuery, index: Tensor) -> tuple[Chosen, ...]:
        """Writes index keys into one layer's cache of these (`IndexedCache`), and chooses what the tokens of each chunk
        see."""
        parts = [(slice(part.begin, part.end), part.slots, index) for part in self.segments]
        for part in parts:
            keep(asked, *part)
        return tuple(choose(asked, *part) for part in parts)


def attend_to_chosen(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    chosen: Tensor,
    scale: float | None,
    sinks: Tensor | None = None,
) -> None:
    """Fills out [n, heads, depth] for queries [n, heads, width] of one sequence, whose tokens' keys and values, [·,
    kv_heads, …] and at least as wide, are in slots int64 [total]. The tokens `chosen` by a query, int64 [n, k] or [n,
    kv_heads, k], are gathered if that is cheaper than reading all and masking the others. `sinks` [heads] are as in
    `attend_by_scores`."""
    width, depth, kv_heads, total = query.shape[2], out.shape[2], keys.shape[1], len(slots)
    chosen = chosen.unsqueeze(1) if chosen.dim() == 2 else chosen
    grouped = query.unflatten(1, (kv_heads, -1))  # [n, kv_heads, group, width]
    lost = None if sinks is None else sinks.float().view(kv_heads, 1, -1)  # each head's
    if gathers(chosen, total, grouped.shape[2]):
        rows = max(1, ROOM // (4 * chosen.shape[2] * kv_heads * width))
        heads = torch.arange(kv_heads, device=slots.device).unsqueeze(1)
        for begin in range(0, len(query), rows):
            part = slice(begin, begin + rows)
            here = slots[chosen[part].clamp(min=0)]
            k, v = (each.to(query.dtype) for each in (keys[here, heads, :width], values[here, heads, :depth]))
            own = None if lost is None else lost.transpose(1, 2)
            made = _weighed(grouped[part], k, v, (chosen[part] >= 0).unsqueeze(2), scale, own)
            out[part] = made.flatten(1, 2)
        return
    both = keys[slots, :, :width], values[slots, :, :depth]
    k, v = (each.to(query.dtype).transpose(0, 1) for each in both)
    rows = max(1, ROOM // (4 * query.shape[1] * total))
    for begin in range(0, len(query), rows):
        part = slice(begin, begin + rows)
        mask = mask_of(chosen[part].transpose(0, 1), total).unsqueeze(2).expand(-1, -1, grouped.shape[2], -1)
        own = None if lost is None else lost.expand(-1, mask.shape[1], -1).flatten(1).unsqueeze(2)
        made = _weighed(grouped[part].transpose(0, 1).flatten(1, 2), k, v, mask.flatten(1, 2), scale, own)
        out[part] = made.unflatten(1, (-1, grouped.shape[2])).transpose(0, 1).flatten(1, 2)


def _weighed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """query […, n, width], key […, m, width], value […, m, depth], and a mask of what is seen, bool […, n, m] → […, n,
    depth]; `sinks` float32 […, n, 1]."""
    if sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query @ key.transpose(-1, -2)).float() * softmax_scale(scale, query.shape[-1])
    return softmax_with_sinks(scores.masked_fill_(~mask, -torch.inf), sinks).to(value.dtype) @ value


def gathers(chosen: Tensor, total: int, group: int) -> bool:
    """Whether what each query has chosen, [n, ·, k], is gathered: for one query, or few, and where so many heads share
    a key, and so few keys of all are chosen, that to copy these takes less than to attend to all.

    >>> one, four = torch.zeros(1, 1, 8), torch.zeros(4, 1, 8)
    >>> gathers(one, 9, 1), gathers(four, 31, 1), gathers(four, 31, 64)
    (True, False, False)
    >>> gathers(torch.zeros(9, 1, 8), 64, 64)
    True
    """
    count = chosen.shape[2]
    return len(chosen) * count <= total or total * group >= _COPIED * count


_COPIED = 256
"""Products of a query with a key that take as long as to copy a key, or longer: on a CPU, with 16 heads and 64."""


def softmax_scale(scale: float | None, width: int) -> float:
    """The factor of products of queries and keys."""
    return width**-0.5 if scale is None else scale


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """query [count, heads, width]; key [total, kv_heads, width], value [total, kv_heads, depth] → [count, heads,
    depth]."""
    kind = rule.kind
    if kind.softcap is not None or rule.sinks is not None:
        scale = kind.softmax_scale(query.shape[-1])
        return attend_by_scores(query, key, value, mask, scale=scale, softcap=kind.softcap, sinks=rule.sinks)
    q, k, v = (each.transpose(0, 1) for each in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kind.scale, enable_gqa=True)
    return out.transpose(0, 1)
