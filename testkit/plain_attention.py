"""Attention over a paged cache in the plainest torch: what every back end is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.families.sight import SpanRule
from llm_service.layers.attention.backend import CAUSAL, AttentionBatch, AttentionKind, CacheShape, PagedChunk, Span
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling
from llm_service.layers.attention.torch_backend import TorchBackend


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    kind: AttentionKind = CAUSAL,
    spans: Sequence[Span] = (),
) -> Tensor:
    """As `AttentionBatch.attend`, in float32, reading no more than `metadata` says; rows of padding stay NaN. Values
    are in keys where there is one tensor."""
    group = query.shape[1] // key.shape[1]
    keys, values = cache[0].flatten(0, 1), cache[-1].flatten(0, 1)[..., : value.shape[-1]]
    keys[metadata.slot_mapping.long()], values[metadata.slot_mapping.long()] = key, value
    out = query.new_full((*query.shape[:2], value.shape[-1]), torch.nan)
    size, sight = cache.shape[2], kind.sight
    for n, length in enumerate(metadata.seq_lens.tolist()):
        if not length:
            continue
        begin, end = metadata.query_start_loc[n : n + 2].tolist()
        position = torch.arange(length, device=query.device)
        slots = metadata.block_table[n, position // size].long() * size + position % size
        k, v = (each[slots].float().repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        q = query[begin:end].float().transpose(0, 1)
        mask = torch.ones(end - begin, length, dtype=torch.bool, device=query.device).tril(length - (end - begin))
        runs = [
            (slice(first - begin, last - begin), slice(length - (end - first), length - (end - last)))
            for first, last in spans
            if begin <= first and last <= end
        ]
        for run in runs:
            mask[run] = True
        if sight.reach:
            near = torch.ones_like(mask).triu(length - (end - begin) + 1 - sight.reach)
            mask &= near | (position < int(metadata.prompts[n])) if sight.answer_window else near
        for run in runs if sight.spans is SpanRule.BEYOND_WINDOWS else ():
            mask[run] = True
        for here, there in runs if sight.spans is SpanRule.WHOLE_PROMPTS else ():
            mask[here, : there.stop] = True
        if sight.spans is SpanRule.ALL_MEDIA:
            own = torch.zeros(end - begin, dtype=torch.bool, device=query.device)
            for here, _ in runs:
                own[here] = True
            mask[:, length - (end - begin) :] |= own.unsqueeze(1) & own
        if sight.chunk:
            part = position // sight.chunk
            mask &= part == part[length - (end - begin) :].unsqueeze(1)
        scores = q @ k.transpose(1, 2) * kind.softmax_scale(query.shape[-1])
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out[begin:end] = (weights @ v).transpose(0, 1).to(query.dtype)
    return out.flatten(1)


_TILING = Tiling(3, 8)


@dataclass(frozen=True)
class PlainTables:
    """A back end that follows `AttentionMetadata`, for graphs: it reads them anew at each use."""

    shape: CacheShape
    name: str = "plain"
    tiling: Tiling = _TILING

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        if spans:
            return TorchBackend(self.shape, torch.device("cpu")).batch(chunks, spans)
        return self.over(AttentionMetadata.of(chunks, self.shape.block_size, torch.device("cpu")))

    def over(self, metadata: AttentionMetadata) -> PlainMetadataBatch:
        return PlainMetadataBatch(metadata, self.shape.kind)


@dataclass(frozen=True)
class PlainMetadataBatch:
    metadata: AttentionMetadata
    kind: AttentionKind

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        return paged_attention(query, key, value, cache, self.metadata, self.kind)
