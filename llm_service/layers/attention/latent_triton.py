"""Attention over a cache of latents by our own Triton kernels, for any GPU and any block size. They know no
spans."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from llm_service.layers.attention.backend import CacheShape
from llm_service.layers.attention.kernel_backend import KernelBackend, PartSums
from llm_service.layers.attention.metadata import AttentionMetadata, WorkList
from llm_service.layers.gpu.latent_kernels import latent_kernel, store_latents_kernel

_HEADS = 16
"""Query heads of one program. Others read the same latents, which are in a cache that all multiprocessors share by
then: with more heads, a row's sums of hundreds of numbers would not fit into registers."""
_ROWS, _FEW_ROWS = 32, 16
"""Rows of one program (a row is a token's query for one head) for chunks of several tokens; the latter in float32,
whose latents take twice the shared memory, and for latents whose sums do not fit into registers."""
_WIDE = 512
"""Width of a latent from which they do not."""


@dataclass(frozen=True, slots=True)
class LatentKernelShape:
    """What the kernels are compiled for: the number of query heads, and the widths of a latent (`rank`) and of the rest
    of a key (`behind`), padded to powers of two."""

    heads: int
    rank: int
    behind: int
    block_size: int
    rows: int
    keys_at_once: int
    stages: int
    warps: int
    precision: str
    softmax_scale: float
    window: int
    chunk: int

    @classmethod
    def of(cls, shape: CacheShape, dtype: torch.dtype) -> LatentKernelShape:
        exact = dtype == torch.float32  # no tensor cores: factors stand in registers, so few keys and many warps
        few = exact or shape.values_in_keys > _WIDE
        return cls(
            heads=shape.heads,
            rank=shape.values_in_keys,
            behind=shape.head_dim - shape.values_in_keys,
            block_size=shape.block_size,
            rows=_FEW_ROWS if few else _ROWS,
            keys_at_once=16 if few else 32,
            stages=1 if exact else 2,
            warps=16 if exact else 8,
            precision="ieee" if exact else "tf32",
            softmax_scale=shape.softmax_scale,
            window=shape.kind.sight.window,
            chunk=shape.kind.sight.chunk,
        )

    @property
    def tile(self) -> int:
        """Tokens of a chunk that one program takes."""
        return max(2, self.rows // self.group(1))

    @property
    def dims(self) -> int:
        """Numbers of a latent, filled up."""
        return _filled_up(self.rank)

    def group(self, tokens: int) -> int:
        """Query heads of a program that takes up to so many tokens: a power of two that divides their number."""
        return math.gcd(self.heads, min(_HEADS, 1 << max(0, (self.rows // tokens).bit_length() - 1)))

    def constants(self, tokens: int) -> dict[str, int | str]:
        """Constants and options of `latent_kernel` for items of up to so many tokens."""
        group = self.group(tokens)
        return {
            "TOKENS": tokens,
            "GROUP": group,
            "ROWS": _filled_up(tokens * group),
            "WINDOW": self.window,
            "CHUNK": self.chunk,
            "RANK": self.rank,
            "BEHIND": self.behind,
            "DIMS": self.dims,
            "DIMS_BEHIND": _filled_up(self.behind),
            "BLOCK_SIZE": self.block_size,
            "BLOCK_N": self.keys_at_once,
            "PRECISION": self.precision,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class LatentTritonBackend(KernelBackend):
    """Makes batches for the kernels, compiled for one shape and type."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.compiled = LatentKernelShape.of(shape, dtype)
        super().__init__(shape, dtype, device, shape.heads // self.compiled.group(1), self.compiled.tile)

    def over(self, metadata: AttentionMetadata) -> LatentTritonBatch:
        """A batch over metadata that can be refilled between uses."""
        return LatentTritonBatch(metadata, self.compiled)


@dataclass(frozen=True, slots=True)
class LatentTritonBatch:
    """A batch of the kernels in `latent_kernels`."""

    metadata: AttentionMetadata
    shape: LatentKernelShape

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBatch`, and `SinksLatents`."""
        metadata = self.metadata
        query, keys, (n, _, width) = query.contiguous(), cache[0], key.shape
        store_latents_kernel[(n,)](
            key, keys, metadata.slot_mapping, key.stride(0), width, WIDTH=triton.next_power_of_2(width)
        )
        out = torch.empty((n, query.shape[1], value.shape[2]), dtype=query.dtype, device=query.device)
        if metadata.decodes:
            self._launch(out, query, keys, sinks, metadata.decode_work, 1)
        if len(metadata.tiles):
            self._launch(out, query, keys, sinks, metadata.tile_work, metadata.tile)
        return out.flatten(1)

    def _launch(
        self, out: Tensor, query: Tensor, keys: Tensor, sinks: Tensor | None, work: WorkList, tokens: int
    ) -> None:
        """Attention of items of up to so many `tokens` each."""
        metadata, shape = self.metadata, self.shape
        group = shape.group(tokens)
        groups = shape.heads // group
        parts = PartSums.of(work, groups, tokens * group, shape.rank, out)
        latent_kernel[(work.most_parts, groups)](
            out,
            parts.mixtures,
            parts.maxima,
            parts.sums,
            query,
            keys,
            query if sinks is None else sinks,  # not read if there are none
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tiles,
            work.parts,
            work.rooms,
            math.log2(math.e) * shape.softmax_scale,
            query.stride(0),
            metadata.block_table.stride(0),
            groups,
            work.items,
            SINKS=sinks is not None,
            **shape.constants(tokens),
        )
        parts.join(out, metadata, work, tokens, group, shape.dims)


def _filled_up(count: int) -> int:
    """Padded to a power of two, and to the least size of a product."""
    return max(16, int(triton.next_power_of_2(count)))
