"""Attention by torch's own operators: for CPUs, and wherever nothing better is there.

A prefill chunk goes through `scaled_dot_product_attention`. Where a sequence's blocks lie in a row its keys are read
where they are, else they are gathered first; so decoding, which would gather the whole context for every token, is left
to a kernel that follows the block table (`numba_decode`), where there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.attention.backend import CacheShape
from llm_service.plan import Chunk

Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, key, value, keys, values, block table int32 [s, w], lengths int32 [s]) → [s, heads, head_dim], for one token
of each sequence, the last of its length: writes its key and value into keys and values, [blocks, block_size, kv_heads,
head_dim], and attends."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A chunk at places [begin, end) behind the decodes.

    `slots` says where the tokens that it sees are: a slice where they lie in a row, else an index. `mask` is bool
    [count, context + count]; None where one token, or a causal mask, says it all.
    """

    begin: int
    end: int
    slots: slice | Tensor
    mask: Tensor | None
    causal: bool


class PlainBackend:
    """Prefill by torch; decoding by `decode`, where it is given."""

    def __init__(self, shape: CacheShape, device: torch.device, decode: Decode | None = None) -> None:
        self.name = "torch" if decode is None else "numba"
        self._shape = shape
        self._device = device
        self._decode = decode

    def batch(self, chunks: Sequence[Chunk]) -> PlainBatch:
        """The batch of a plan: its leading decodes for the kernel, if there is one; a segment for each other chunk."""
        size, device = self._shape.block_size, self._device
        decodes = 0
        if self._decode is not None:
            decodes = next((n for n, chunk in enumerate(chunks) if chunk.count != 1), len(chunks))
        widest = max((len(chunk.blocks) for chunk in chunks[:decodes]), default=0)
        table = torch.tensor(
            [chunk.blocks + [0] * (widest - len(chunk.blocks)) for chunk in chunks[:decodes]], dtype=torch.int32
        )
        lengths = torch.tensor([chunk.context + 1 for chunk in chunks[:decodes]], dtype=torch.int32)
        written, segments, begin = [torch.empty(0, dtype=torch.int64, device=device)], [], 0
        for chunk in chunks[decodes:]:
            slots = _slots(chunk, size, device)
            total = chunk.context + chunk.count
            place = torch.arange(slots.start, slots.stop, device=device) if isinstance(slots, slice) else slots
            written.append(place[chunk.context :])
            cut = chunk.count > 1 and chunk.context > 0
            mask = torch.ones(chunk.count, total, dtype=torch.bool, device=device).tril(chunk.context) if cut else None
            segments.append(_Segment(begin, begin + chunk.count, slots, mask, chunk.count > 1 and not cut))
            begin += chunk.count
        return PlainBatch(torch.cat(written), table, lengths, tuple(segments), self._decode)


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """`table` and `lengths` are of the leading decodes; `slots` int64 is where the keys and values of all others go."""

    slots: Tensor
    table: Tensor
    lengths: Tensor
    segments: tuple[_Segment, ...]
    decode: Decode | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        decodes = len(self.lengths)
        if not decodes or self.decode is None:
            return self._prefill(query, key, value, cache).flatten(1)
        first = query[:decodes], key[:decodes], value[:decodes]
        decoded = self.decode(*first, cache[0], cache[1], self.table, self.lengths).flatten(1)
        if not self.segments:
            return decoded
        rest = query[decodes:], key[decodes:], value[decodes:]
        return torch.cat([decoded, self._prefill(*rest, cache).flatten(1)])

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """What comes after the decodes: [m, heads, head_dim]."""
        keys, values = cache.flatten(1, 2)  # each [slots, kv_heads, head_dim]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for segment in self.segments:
            attended = functional.scaled_dot_product_attention(
                query[segment.begin : segment.end].transpose(0, 1).unsqueeze(0),
                keys[segment.slots].transpose(0, 1).unsqueeze(0),
                values[segment.slots].transpose(0, 1).unsqueeze(0),
                attn_mask=segment.mask,
                is_causal=segment.causal,
                enable_gqa=True,
            )
            out[segment.begin : segment.end] = attended.squeeze(0).transpose(0, 1)
        return out


def _slots(chunk: Chunk, size: int, device: torch.device) -> slice | Tensor:
    """Where a sequence's first context + count tokens are."""
    total = chunk.context + chunk.count
    if all(after == before + 1 for before, after in itertools.pairwise(chunk.blocks)):
        return slice(chunk.blocks[0] * size, chunk.blocks[0] * size + total)
    starts = torch.tensor(chunk.blocks, device=device).unsqueeze(1) * size
    return (starts + torch.arange(size, device=device)).flatten()[:total]
