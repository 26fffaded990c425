"""What attention back ends with our own Triton kernels share: batches, chunks with spans, which torch computes, and
joining parts of contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBatch, CacheShape, PagedChunk, ScaledBatch, Span
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling, WorkList
from llm_service.layers.attention.spanned import batch_with_spans
from llm_service.layers.gpu.part_kernels import combine_kernel

_WAVES = 4
"""Programs that each multiprocessor should get, so that few sequences still fill the GPU."""
COMBINED = 16
"""Parts of a context that are joined at once."""
_LONG = 256
"""Tokens before a chunk from which its context is split into two parts."""


class KernelBackend:
    """Makes batches for kernels that are compiled for one shape and type. They know no spans: torch computes chunks
    that have any. Each part of a context is for `groups` programs, and chunks are cut into tiles of `tile` tokens."""

    name = "triton"

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device, groups: int, tile: int) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self.tiling = Tiling(max(1, _WAVES * _multiprocessors(device) // groups), tile)

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        """The batch of a plan."""
        if spans:
            return batch_with_spans(self, chunks, spans, self.shape, self._device)
        return self.over(AttentionMetadata.of(chunks, self.shape.block_size, self._device, self.tiling))

    def over(self, metadata: AttentionMetadata) -> AttentionBatch:
        """A batch over metadata that can be refilled between uses."""
        raise NotImplementedError

    def warm_up(self, cache: Tensor, scales: Tensor | None = None) -> None:
        """Has every kernel compiled, over the null block of one layer's cache."""
        shape, null_block = self.shape, self.shape.null_block
        for count in (1, 2):
            chunk = PagedChunk(_LONG, count, [null_block] * -(-(_LONG + count) // shape.block_size))
            metadata = AttentionMetadata.of([chunk], shape.block_size, self._device, Tiling(2, self.tiling.tile))
            batch = self.over(metadata)
            scaled = batch if scales is None else cast(ScaledBatch, batch).with_scales(scales)
            scaled.attend(*shape.zeros(count, self._dtype, self._device), cache)


@dataclass(frozen=True, slots=True)
class PartSums:
    """Partial results of contexts until they are joined, float32: `mixtures` [room, groups, rows, width], their
    `maxima` and `sums` of weights [room, groups, rows]. If no context has several parts, they are not read."""

    mixtures: Tensor
    maxima: Tensor
    sums: Tensor

    @classmethod
    def of(cls, work: WorkList, groups: int, rows: int, width: int, out: Tensor) -> PartSums:
        """For this work, by programs of so many rows, whose result is `out`."""
        if not len(work.split):
            return cls(out, out, out)
        places = work.room, groups, rows
        mixtures = torch.empty((*places, width), dtype=torch.float32, device=out.device)
        maxima, sums = torch.empty((2, *places), dtype=torch.float32, device=out.device)
        return cls(mixtures, maxima, sums)

    def join(
        self, out: Tensor, metadata: AttentionMetadata, work: WorkList, tokens: int, group: int, dims: int
    ) -> None:
        """Joins items of up to so many tokens, each with `group` rows, whose `width` is padded to `dims`."""
        if not len(work.split):
            return
        _, groups, rows, width = self.mixtures.shape
        combine_kernel[(len(work.split), rows, groups)](
            out,
            self.mixtures,
            self.maxima,
            self.sums,
            metadata.query_start_loc,
            metadata.tiles,
            work.parts,
            work.rooms,
            work.split,
            groups,
            TOKENS=tokens,
            GROUP=group,
            HEAD_DIM=width,
            DIMS=dims,
            PARTS=COMBINED,
            num_warps=4,
        )


def _multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the GPU; 1 if kernels are interpreted on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
