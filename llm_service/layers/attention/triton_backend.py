"""Attention by our own Triton kernels, for any GPU and any block size. They know no spans: torch computes steps that
have any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBatch, CacheShape, PagedChunk, Span
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling, WorkList
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.attention.triton_kernels import (
    attention_kernel,
    combine_kernel,
    store_int8_kernel,
    store_kernel,
)

_WAVES = 4
"""Programs that each multiprocessor should get, so that few sequences still fill the GPU."""
_FEWEST = 16
"""Rows of a product at the least."""
_ROWS, _WIDE_ROWS = 64, 32
"""Rows of one program, a row being a token's query for one head, where chunks of several tokens are computed; the
latter with heads above 256, whose sums would leave the registers otherwise."""
COMBINED = 16
"""Parts of a context that are joined at once."""
_LONG = 256
"""Tokens before a chunk whose context has two parts."""


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
    window: int
    chunk: int
    prompts: bool
    softcap: float
    softmax_scale: float
    int8: bool

    @classmethod
    def of(cls, shape: CacheShape, dtype: torch.dtype) -> KernelShape:
        dims = max(16, triton.next_power_of_2(shape.head_dim))
        exact = dtype == torch.float32  # no tensor cores: factors stand in registers, so few keys and many warps
        # With the queries, keys and values in flight are to take less than 99 KiB of shared memory.
        small = dims * dtype.itemsize <= 256
        stages = 1 if exact else 2
        return cls(
            group=shape.heads // shape.kv_heads,
            head_dim=shape.head_dim,
            dims=dims,
            block_size=shape.block_size,
            keys_at_once=16 if exact else 64 if small else 32,
            stages=stages,
            decode_stages=stages,
            prefill_warps=16 if exact else 4 if small else 8,
            precision="ieee" if exact else "tf32",
            window=shape.kind.window,
            chunk=shape.kind.chunk,
            prompts=shape.kind.sees_prompt,
            softcap=shape.kind.softcap or 0.0,
            softmax_scale=shape.softmax_scale,
            int8=shape.int8,
        )

    @property
    def tile(self) -> int:
        """Tokens of a chunk that one program takes."""
        return max(2, (_ROWS if self.dims <= 256 else _WIDE_ROWS) // self.group)

    def rows(self, tokens: int) -> dict[str, int | float | bool]:
        """Constants and options of `attention_kernel` for items of up to so many tokens. With its drafts a token may
        take no more rows than alone."""
        rows = max(_FEWEST, triton.next_power_of_2(tokens * self.group))
        few = rows == _FEWEST
        return {
            "TOKENS": tokens,
            "GROUP": self.group,
            "ROWS": rows,
            "HEAD_DIM": self.head_dim,
            "DIMS": self.dims,
            "WINDOW": self.window,
            "CHUNK": self.chunk,
            "PROMPTS": self.prompts,
            "SOFTCAP": self.softcap,
            "num_warps": 4 if few else self.prefill_warps,
            "num_stages": self.decode_stages if few else self.stages,
        }


class TritonBackend:
    """Makes batches for the kernels, compiled for one shape and type."""

    name = "triton"

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self.compiled = KernelShape.of(shape, dtype)
        self.tiling = Tiling(max(1, _WAVES * multiprocessors(device) // shape.kv_heads), self.compiled.tile)

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        """The batch of a plan."""
        if spans:
            return TorchBackend(self.shape, self._device).batch(chunks, spans)
        return self.over(AttentionMetadata.of(chunks, self.shape.block_size, self._device, self.tiling))

    def over(self, metadata: AttentionMetadata) -> TritonBatch:
        """A batch over metadata that may be filled anew between uses."""
        return TritonBatch(metadata, self.compiled)

    def warm_up(self, cache: Tensor) -> None:
        """Has every kernel compiled, over the null block of one layer's cache."""
        shape, null_block = self.shape, self.shape.null_block
        for count in (1, 2):
            chunk = PagedChunk(_LONG, count, [null_block] * -(-(_LONG + count) // shape.block_size))
            metadata = AttentionMetadata.of([chunk], shape.block_size, self._device, Tiling(2, self.compiled.tile))
            TritonBatch(metadata, self.compiled).attend(*shape.zeros(count, self._dtype, self._device), cache)


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch of the kernels in `triton_kernels`."""

    metadata: AttentionMetadata
    shape: KernelShape

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`. The heads of one token must lie one after the other."""
        metadata = self.metadata
        self._store(key, value, cache)
        n, _, head_dim = query.shape
        out = torch.empty((n, query.shape[1], head_dim), dtype=query.dtype, device=query.device)
        scale = math.log2(math.e) * self.shape.softmax_scale
        if metadata.decodes:
            self._launch(out, query, cache, scale, metadata.decode_work, 1)
        if len(metadata.tiles):
            self._launch(out, query, cache, scale, metadata.tile_work, metadata.tile)
        return out.flatten(1)

    def _store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        slots, (n, kv_heads, head_dim) = self.metadata.slot_mapping, key.shape
        if self.shape.int8:
            scales = cache.view(torch.float32)
            store_int8_kernel[(n,)](
                key,
                value,
                cache[0],
                cache[1],
                scales[0],
                scales[1],
                slots,
                key.stride(0),
                value.stride(0),
                kv_heads,
                BLOCK_SIZE=self.shape.block_size,
                HEAD_DIM=head_dim,
                HEADS=triton.next_power_of_2(kv_heads),
                DIMS=self.shape.dims,
            )
            return
        width = kv_heads * head_dim
        store_kernel[(n,)](
            key,
            value,
            cache[0],
            cache[1],
            slots,
            key.stride(0),
            value.stride(0),
            width,
            WIDTH=triton.next_power_of_2(width),
        )

    def _launch(self, out: Tensor, query: Tensor, cache: Tensor, scale: float, work: WorkList, tokens: int) -> None:
        """Attention of items of up to so many `tokens` each."""
        metadata, shape = self.metadata, self.shape
        kv_heads, used = query.shape[1] // shape.group, tokens * shape.group
        mixtures = maxima = sums = out
        scales = cache.view(torch.float32) if shape.int8 else cache  # which are not read
        if len(work.split):
            places = work.room, kv_heads, used
            mixtures = torch.empty((*places, shape.head_dim), dtype=torch.float32, device=query.device)
            maxima, sums = torch.empty((2, *places), dtype=torch.float32, device=query.device)
        attention_kernel[(work.most_parts, kv_heads)](
            out,
            mixtures,
            maxima,
            sums,
            query,
            cache[0],
            cache[1],
            scales[0],
            scales[1],
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.prompts,
            metadata.tiles,
            work.parts,
            work.rooms,
            scale,
            query.stride(0),
            metadata.block_table.stride(0),
            kv_heads,
            work.items,
            BLOCK_SIZE=shape.block_size,
            BLOCK_N=shape.keys_at_once,
            PRECISION=shape.precision,
            INT8=shape.int8,
            **shape.rows(tokens),
        )
        if len(work.split):
            combine_kernel[(len(work.split), used, kv_heads)](
                out,
                mixtures,
                maxima,
                sums,
                metadata.query_start_loc,
                metadata.tiles,
                work.parts,
                work.rooms,
                work.split,
                kv_heads,
                TOKENS=tokens,
                GROUP=shape.group,
                HEAD_DIM=shape.head_dim,
                DIMS=shape.dims,
                PARTS=COMBINED,
                num_warps=4,
            )


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 1 where the kernels are interpreted on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
