"""Attention by our own Triton kernels, for any GPU and any block size. They know no spans: torch computes chunks
that have any."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from llm_service.layers.attention.backend import CacheShape
from llm_service.layers.attention.kernel_backend import KernelBackend, PartSums
from llm_service.layers.attention.metadata import AttentionMetadata, WorkList
from llm_service.layers.attention.triton_kernels import (
    attention_kernel,
    store_int8_kernel,
    store_kernel,
)

_FEWEST = 16
"""Rows of a product at the least."""
_ROWS, _WIDE_ROWS = 64, 32
"""Rows of one program (a row is a token's query for one head) for chunks of several tokens; the latter for heads above
256, whose sums would not fit into registers otherwise."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the kernels are compiled for; `dims` is the head's size, padded to a power of two, and `stages` is how many
    blocks of keys and values are in flight at once."""

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
    fp8: bool

    @classmethod
    def of(cls, shape: CacheShape, dtype: torch.dtype) -> KernelShape:
        dims = max(16, triton.next_power_of_2(shape.head_dim))
        exact = dtype == torch.float32  # no tensor cores: factors stand in registers, so few keys and many warps
        # With the queries, keys and values in flight must take less than 99 KiB of shared memory.
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
            window=shape.kind.sight.reach,
            chunk=shape.kind.sight.chunk,
            prompts=shape.kind.sight.answer_window > 0,
            softcap=shape.kind.softcap or 0.0,
            softmax_scale=shape.softmax_scale,
            int8=shape.int8,
            fp8=shape.fp8,
        )

    @property
    def tile(self) -> int:
        """Tokens of a chunk that one program takes."""
        return max(2, (_ROWS if self.dims <= 256 else _WIDE_ROWS) // self.group)

    def rows(self, tokens: int) -> dict[str, int | float | bool]:
        """Constants and options of `attention_kernel` for items of up to so many tokens. A token with its drafts may
        need no more rows than alone."""
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


class TritonBackend(KernelBackend):
    """Makes batches for the kernels, compiled for one shape and type."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.compiled = KernelShape.of(shape, dtype)
        super().__init__(shape, dtype, device, shape.kv_heads, self.compiled.tile)

    def over(self, metadata: AttentionMetadata) -> TritonBatch:
        """A batch over metadata that can be refilled between uses."""
        return TritonBatch(metadata, self.compiled)


def store(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    """Writes key and value [n, kv_heads, head_dim], whose heads of a token are contiguous, into one layer's cache [2,
    blocks, block_size, kv_heads, head_dim], at `slots`; `scales` as in `ScaledBatch`."""
    width = key.shape[1] * key.shape[2]
    key_stride, value_stride = key.stride(0), value.stride(0)
    store_kernel[(len(key),)](
        *(key, value, cache[0], cache[1], cache if scales is None else scales, slots, key_stride, value_stride, width),
        WIDTH=triton.next_power_of_2(width),
        HEAD_DIM=key.shape[2],
        FP8=cache.dtype == torch.float8_e4m3fn,
        SCALED=scales is not None,
    )


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch of the kernels in `triton_kernels`; `scales` as in `ScaledBatch`."""

    metadata: AttentionMetadata
    shape: KernelShape
    scales: Tensor | None = None

    def with_scales(self, scales: Tensor) -> TritonBatch:
        """See `ScaledBatch`."""
        return TritonBatch(self.metadata, self.shape, scales)

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
        store(key, value, cache, slots, self.scales)

    def _launch(self, out: Tensor, query: Tensor, cache: Tensor, scale: float, work: WorkList, tokens: int) -> None:
        """Attention of items of up to so many `tokens` each."""
        metadata, shape = self.metadata, self.shape
        kv_heads = query.shape[1] // shape.group
        parts = PartSums.of(work, kv_heads, tokens * shape.group, shape.head_dim, out)
        scales = cache.view(torch.float32) if shape.int8 else cache if self.scales is None else self.scales
        attention_kernel[(work.most_parts, kv_heads)](
            out,
            parts.mixtures,
            parts.maxima,
            parts.sums,
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
            SCALED=self.scales is not None,
            **shape.rows(tokens),
        )
        parts.join(out, metadata, work, tokens, shape.group, shape.dims)
