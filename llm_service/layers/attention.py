"""Attention over the paged KV cache: the description of a batch, and the back end for CPUs.

Keys and values of one layer lie in a tensor [2, kv_heads, slots, head_dim]; slot = block number · block size + offset.
Other back ends take the same `AttentionBatch`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Segment:
    """A chunk of one sequence: batch places [begin, end), `context` tokens before it in the cache.

    `slots` says where its context and own tokens are: a slice where the blocks lie in a row, so that no copy is needed,
    else an index [context + end − begin]. `mask` is bool [end − begin, context + end − begin]; None where it is simply
    causal or where one token sees everything.
    """

    begin: int
    end: int
    context: int
    slots: slice | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a flattened batch of n tokens goes and what it sees; `slots` is int64 [n]."""

    slots: Tensor
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, chunks: list[tuple[int, int, list[int]]], block_size: int, device: torch.device) -> AttentionBatch:
        """From (context, count, block table) of each chunk."""
        segments, written, begin = [], [], 0
        for context, count, blocks in chunks:
            total = context + count
            slots = _slots(blocks, total, block_size, device)
            if isinstance(slots, slice):
                written.append(torch.arange(slots.start + context, slots.start + total, device=device))
            else:
                written.append(slots[context:])
            segments.append(Segment(begin, begin + count, context, slots, _mask(context, count, device)))
            begin += count
        return cls(torch.cat(written), tuple(segments))


def _slots(blocks: list[int], total: int, size: int, device: torch.device) -> slice | Tensor:
    if all(after == before + 1 for before, after in itertools.pairwise(blocks)):
        return slice(blocks[0] * size, blocks[0] * size + total)
    starts = torch.tensor(blocks, device=device).unsqueeze(1) * size
    return (starts + torch.arange(size, device=device)).flatten()[:total]


def _mask(context: int, count: int, device: torch.device) -> Tensor | None:
    if count == 1 or context == 0:
        return None
    return torch.ones(count, context + count, dtype=torch.bool, device=device).tril(context)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """Writes the batch's keys and values into the cache, then attends causally within each sequence.

    query [n, heads, head_dim]; key, value [n, kv_heads, head_dim]; cache [2, kv_heads, slots, head_dim].
    Returns [n, heads · head_dim].
    """
    cache[0].index_copy_(1, batch.slots, key.transpose(0, 1))
    cache[1].index_copy_(1, batch.slots, value.transpose(0, 1))
    out = torch.empty_like(query)
    for segment in batch.segments:
        known = cache[:, :, segment.slots]  # [2, kv_heads, context + count, head_dim]
        if segment.end - segment.begin == 1:
            out[segment.begin] = _attend_one(query[segment.begin], known[0], known[1], scale)
            continue
        attended = functional.scaled_dot_product_attention(
            query[segment.begin : segment.end].transpose(0, 1).unsqueeze(0),
            known[:1],
            known[1:],
            attn_mask=segment.mask,
            is_causal=segment.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[segment.begin : segment.end] = attended.squeeze(0).transpose(0, 1)
    return out.flatten(1)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One token: query [heads, head_dim], keys and values [kv_heads, total, head_dim] → [heads, head_dim].

    Heads that share keys go through one product, so that the keys are read once.
    """
    grouped = query.view(keys.shape[0], -1, query.shape[-1])  # [kv_heads, group, head_dim]
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
    return torch.bmm(scores.float().softmax(-1).to(values.dtype), values).view_as(query)
