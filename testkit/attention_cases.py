"""Random batches over a paged cache full of noise, for every back end of attention, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm_service.families.sight import Sight
from llm_service.layers.attention.backend import AttentionBackend, AttentionKind, CacheShape, PagedChunk, Span
from llm_service.layers.attention.metadata import AttentionMetadata
from testkit.plain_attention import paged_attention

CPU = torch.device("cpu")
CAPPED = AttentionKind(scale=0.4, softcap=1.5)
"""Of scores several of which are far above it."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
WAYS = {"decodes": (1, 1, 1, 1), "prefills": (70, 33, 16, 64), "mixed": (1, 1, 65, 1, 20)}
"""How many tokens each chunk of a batch has."""


def otherwise(kind: AttentionKind, **changed: Any) -> AttentionKind:
    """A kind, some of whose fields, or of those of its sight, have other values."""
    seen = {name: value for name, value in changed.items() if name in Sight.__slots__}
    others = {name: value for name, value in changed.items() if name not in seen}
    return replace(kind, sight=replace(kind.sight, **seen), **others)


@dataclass
class Case:
    """A batch over a cache full of noise."""

    shape: CacheShape
    chunks: list[PagedChunk]
    cache: torch.Tensor
    qkv: torch.Tensor

    @classmethod
    def random(
        cls, shape: CacheShape, counts: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device = CPU
    ) -> Case:
        numbers = random.Random(seed)
        free = list(range(shape.blocks))
        numbers.shuffle(free)
        chunks = []
        for count in counts:
            context = numbers.choice([0, 1, 15, 16, 17, 100, 200])
            blocks = [free.pop() for _ in range(-(-(context + count) // shape.block_size))]
            chunks.append(PagedChunk(context, count, blocks))
        generator = torch.Generator().manual_seed(seed)
        cache = torch.randn(shape.new_cache(torch.float32, CPU).shape, generator=generator).to(device, dtype)
        heads = shape.heads + 2 * shape.kv_heads
        qkv = torch.randn(sum(counts), heads, shape.head_dim, generator=generator).to(device, dtype)
        return cls(shape, chunks, cache, qkv)

    def with_answers(self, seed: int) -> Case:
        """The same with sequences some of whose tokens are an answer's: none, those of the chunk or some of them, and
        more."""
        numbers = random.Random(seed)
        each = ((chunk, numbers.choice([0, 1, chunk.count // 2, chunk.count, 99])) for chunk in self.chunks)
        chunks = [replace(chunk, answered=min(count, chunk.context + chunk.count)) for chunk, count in each]
        return replace(self, chunks=chunks)

    @property
    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        query, key, value = self.qkv.split([self.shape.heads, self.shape.kv_heads, self.shape.kv_heads], dim=1)
        return query, key, key[..., : self.shape.value_dim] if self.shape.values_in_keys else value

    def check(self, backend: AttentionBackend, spans: Sequence[Span] = ()) -> None:
        """The back end's output and what it leaves in the cache are the plain ones, which are computed in the type of
        what comes in."""
        query, key, value = self.heads
        here, there = self.cache.clone(), self.cache.to(query.dtype, copy=True)
        metadata = AttentionMetadata.of(self.chunks, self.shape.block_size, self.qkv.device)
        expected = paged_attention(query, key, value, there[0], metadata, self.shape.kind, spans)
        given = backend.batch(self.chunks, spans).attend(query, key, value, here[0])
        tolerance = TOLERANCE[here.dtype]
        torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(here, there.to(here.dtype))


def latents_of(width: int = 40, rank: int = 32, heads: int = 4, block_size: int = 16) -> CacheShape:
    """Of keys with their values in them."""
    return replace(shape_of(width, heads, 1, block_size), values_in_keys=rank)


def shape_of(head_dim: int = 64, heads: int = 4, kv_heads: int = 2, block_size: int = 16) -> CacheShape:
    return CacheShape(1, 1600 // block_size, block_size, heads, kv_heads, head_dim)


def of_e4m3(
    case: Case, shape: CacheShape, scales: torch.Tensor | None, spans: Sequence[Span] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A case's cache in e4m3, what it stands for once the case's tokens are in it, and what attention makes of that;
    `scales` as in `ScaledBatch`."""
    query, key, value = case.heads
    by = torch.ones(2, shape.kv_heads, device=query.device) if scales is None else scales

    def rounded(x: torch.Tensor, part: int) -> torch.Tensor:
        return (x.float() / by[part].unsqueeze(1)).clamp(-448, 448).to(torch.float8_e4m3fn)

    small = torch.stack([rounded(each, part) for part, each in enumerate(case.cache[0])])
    plain = small.float() * by.view(2, 1, 1, -1, 1)
    near = [rounded(each, part).float() * by[part].unsqueeze(1) for part, each in enumerate((key, value))]
    metadata = AttentionMetadata.of(case.chunks, shape.block_size, query.device)
    return small, plain, paged_attention(query, *near, plain, metadata, shape.kind, spans)
