"""Attention by our own Triton kernels, for any GPU and any block size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from llm_service.layers.attention.backend import CacheShape, PagedChunk
from llm_service.layers.attention.metadata import TILE, AttentionMetadata
from llm_service.layers.attention.triton_kernels import combine_kernel, decode_kernel, prefill_kernel, store_kernel

_WAVES = 4
"""Programs of a decode that each multiprocessor should get, so that few sequences still fill the GPU."""
COMBINED = 16
"""Parts of a context that are joined at once."""
_LONG = 255
"""Tokens before a decode whose context has two parts."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the kernels are compiled for; `dims` is the head's size, filled up to a power of two, and
    `stages` is how many blocks of keys and values are on their way at once."""

    group: int
    head_dim: int
    dims: int
    block_size: int
    keys_at_once: int
    stages: int
    decode_stages: int
    prefill_warps: int
    precision: str

    @classmethod
    def of(cls, shape: CacheShape, dtype: torch.dtype) -> KernelShape:
        dims = max(16, triton.next_power_of_2(shape.head_dim))
        exact = dtype == torch.float32  # no tensor cores: factors stand in registers, so few keys and many warps
        # Keys and values in flight are to take at most 64 KiB of shared memory beside the queries.
        small = dims * dtype.itemsize <= 256
        stages = 2 if small and not exact else 1
        return cls(
            group=shape.heads // shape.kv_heads,
            head_dim=shape.head_dim,
            dims=dims,
            block_size=shape.block_size,
            keys_at_once=16 if exact else 64 if small else 32,
            stages=stages,
            decode_stages=stages,
            prefill_warps=16 if exact else 4,
            precision="ieee" if exact else "tf32",
        )


class TritonBackend:
    """Makes batches for the kernels, compiled for one shape and type."""

    name = "triton"

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        self.compiled = KernelShape.of(shape, dtype)
        self.parts = max(1, _WAVES * _multiprocessors(device) // shape.kv_heads)

    def batch(self, chunks: Sequence[PagedChunk]) -> TritonBatch:
        """The batch of a plan."""
        return self.over(AttentionMetadata.of(chunks, self.shape.block_size, self._device, self.parts))

    def over(self, metadata: AttentionMetadata) -> TritonBatch:
        """A batch over metadata that may be filled anew between uses."""
        return TritonBatch(metadata, self.compiled)

    def warm_up(self, cache: Tensor) -> None:
        """Has every kernel compiled, over the null block of one layer's cache."""
        shape, null_block = self.shape, self.shape.null_block
        for context, count in ((_LONG, 1), (0, 2)):
            chunk = PagedChunk(context, count, [null_block] * -(-(context + count) // shape.block_size))
            metadata = AttentionMetadata.of([chunk], shape.block_size, self._device, 2)
            TritonBatch(metadata, self.compiled).attend(*shape.zeros(count, cache.dtype, self._device), cache)


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch of the kernels in `kernels`."""

    metadata: AttentionMetadata
    shape: KernelShape

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`. The heads of one token must lie one after the other."""
        metadata, shape = self.metadata, self.shape
        keys, values = cache[0], cache[1]
        n, kv_heads, head_dim = key.shape
        width = kv_heads * head_dim
        store_kernel[(n,)](
            key,
            value,
            keys,
            values,
            metadata.slot_mapping,
            key.stride(0),
            value.stride(0),
            width,
            WIDTH=triton.next_power_of_2(width),
        )
        out = torch.empty((n, query.shape[1], head_dim), dtype=query.dtype, device=query.device)
        scale = math.log2(math.e) / math.sqrt(head_dim)
        if metadata.decodes:
            self._decode(out, query, keys, values, scale)
        if len(metadata.tiles):
            prefill_kernel[(len(metadata.tiles), query.shape[1])](
                out,
                query,
                keys,
                values,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.tiles,
                scale,
                query.stride(0),
                metadata.block_table.stride(0),
                kv_heads,
                GROUP=shape.group,
                HEAD_DIM=shape.head_dim,
                DIMS=shape.dims,
                BLOCK_SIZE=shape.block_size,
                BLOCK_M=TILE,
                BLOCK_N=shape.keys_at_once,
                PRECISION=shape.precision,
                num_warps=shape.prefill_warps,
                num_stages=shape.stages,
            )
        return out.flatten(1)

    def _decode(self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        metadata, shape = self.metadata, self.shape
        heads, kv_heads = query.shape[1], query.shape[1] // shape.group
        mixtures = maxima = sums = out
        if len(metadata.split):
            rows = (metadata.most_parts, heads)
            mixtures = torch.empty((*rows, shape.head_dim), dtype=torch.float32, device=query.device)
            maxima, sums = torch.empty((2, *rows), dtype=torch.float32, device=query.device)
        decode_kernel[(metadata.most_parts, kv_heads)](
            out,
            mixtures,
            maxima,
            sums,
            query,
            keys,
            values,
            metadata.block_table,
            metadata.decode_lengths,
            metadata.parts,
            scale,
            query.stride(0),
            metadata.block_table.stride(0),
            kv_heads,
            metadata.decodes,
            GROUP=shape.group,
            ROWS=max(16, triton.next_power_of_2(shape.group)),
            HEAD_DIM=shape.head_dim,
            DIMS=shape.dims,
            BLOCK_SIZE=shape.block_size,
            BLOCK_N=shape.keys_at_once,
            PRECISION=shape.precision,
            num_warps=4,
            num_stages=shape.decode_stages,
        )
        if len(metadata.split):
            combine_kernel[(len(metadata.split), heads)](
                out,
                mixtures,
                maxima,
                sums,
                metadata.parts,
                metadata.split,
                heads,
                HEAD_DIM=shape.head_dim,
                DIMS=shape.dims,
                PARTS=COMBINED,
                num_warps=4,
            )


def _multiprocessors(device: torch.device) -> int:
    """Of the GPU; 1 where the kernels are interpreted on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
