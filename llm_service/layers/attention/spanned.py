"""Steps with spans, whose tokens see each other, for back ends whose kernels do not support these: torch computes the
chunks with spans, and the kernels all others, as they would without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import cast

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    CacheShape,
    PagedChunk,
    ScaledBatch,
    Span,
    spans_of,
)
from llm_service.layers.attention.torch_backend import TorchBackend, TorchBatch


@dataclass(frozen=True, slots=True)
class SpannedBatch:
    """`spanned` computes the tokens at `places` int64 of a step, `plain` the others, at `rest`."""

    spanned: TorchBatch
    places: Tensor
    plain: AttentionBatch
    rest: Tensor

    def with_scales(self, scales: Tensor) -> SpannedBatch:
        """See `ScaledBatch`."""
        plain = cast(ScaledBatch, self.plain).with_scales(scales)
        return replace(self, spanned=self.spanned.with_scales(scales), plain=plain)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        here, there = self.places, self.rest
        first = self.spanned.attend(query[here], key[here], value[here], cache)
        out = first.new_empty(len(query), first.shape[1])
        out[here], out[there] = first, self.plain.attend(query[there], key[there], value[there], cache)
        return out


def batch_with_spans(
    kernels: AttentionBackend,
    chunks: Sequence[PagedChunk],
    spans: Sequence[Span],
    shape: CacheShape,
    device: torch.device,
) -> AttentionBatch:
    """The batch of a plan with such spans, over a cache of this shape on the device."""
    by_torch, each = TorchBackend(shape, device), spans_of(chunks, spans)
    has_any = [bool(own) for own in each]
    if all(has_any):
        return by_torch.batch(chunks, spans)
    moved, begin = list[Span](), 0
    for chunk, own in zip(chunks, each, strict=True):
        moved += [(begin + first, begin + last) for first, last in own]
        begin += chunk.count if own else 0
    there = np.repeat(has_any, [chunk.count for chunk in chunks])
    places, rest = to_device([np.flatnonzero(there), np.flatnonzero(~there)], device)
    spanned = by_torch.batch([*compress(chunks, has_any)], moved)
    return SpannedBatch(spanned, places, kernels.batch([*compress(chunks, [not any_ for any_ in has_any])]), rest)
