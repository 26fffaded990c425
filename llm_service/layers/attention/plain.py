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

Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(out, query, keys, values, block table int32 [s, w], lengths int32 [s]): writes out [s, heads, head_dim], for one
token of each sequence; keys and values are [blocks, block_size, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A chunk at batch places [begin, end); `slots` says where the tokens that it sees are: a slice where they lie in a
    row, else an index. `mask` is bool [count, context + count]; None where one token, or a causal mask, says it all."""

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
        ends = [chunk.blocks[-1] * size + chunk.context % size for chunk in chunks[:decodes]]
        written, segments, begin = [torch.tensor(ends, dtype=torch.int64, device=device)], [], decodes
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
    """`slots` int64 [n] is where keys and values go; `table` and `lengths` are of the leading decodes."""

    slots: Tensor
    table: Tensor
    lengths: Tensor
    segments: tuple[_Segment, ...]
    decode: Decode | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        keys, values = cache[0], cache[1]
        known_keys, known_values = keys.flatten(0, 1), values.flatten(0, 1)  # [slots, kv_heads, head_dim]
        known_keys.index_copy_(0, self.slots, key)
        known_values.index_copy_(0, self.slots, value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if (decodes := len(self.lengths)) and self.decode is not None:
            self.decode(out[:decodes], query[:decodes], keys, values, self.table, self.lengths)
        for segment in self.segments:
            attended = functional.scaled_dot_product_attention(
                query[segment.begin : segment.end].transpose(0, 1).unsqueeze(0),
                known_keys[segment.slots].transpose(0, 1).unsqueeze(0),
                known_values[segment.slots].transpose(0, 1).unsqueeze(0),
                attn_mask=segment.mask,
                is_causal=segment.causal,
                enable_gqa=True,
            )
            out[segment.begin : segment.end] = attended.squeeze(0).transpose(0, 1)
        return out.flatten(1)


def _slots(chunk: Chunk, size: int, device: torch.device) -> slice | Tensor:
    """Where a sequence's first context + count tokens are."""
    total = chunk.context + chunk.count
    if all(after == before + 1 for before, after in itertools.pairwise(chunk.blocks)):
        return slice(chunk.blocks[0] * size, chunk.blocks[0] * size + total)
    starts = torch.tensor(chunk.blocks, device=device).unsqueeze(1) * size
    return (starts + torch.arange(size, device=device)).flatten()[:total]
