"""What the decoder asks of attention, whoever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One rank's KV cache. It has one block more, the `null_block`: padding is written there."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def null_block(self) -> int:
        """The number of the block that no sequence holds."""
        return self.blocks

    @property
    def block_elements(self) -> int:
        """Numbers that one block holds over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size

    def new_cache(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A cache, [layers, 2, blocks + 1, block_size, kv_heads, head_dim]: index 1 is keys, then values.

        On a CPU it takes memory as it fills: our kernels read nothing that was not written. A GPU's holds zeros, since
        flash-attn multiplies the values behind a sequence's end by zero, and what is not a number would stay.
        """
        shape = (self.layers, 2, self.blocks + 1, self.block_size, self.kv_heads, self.head_dim)
        make = torch.empty if device.type == "cpu" else torch.zeros
        return make(shape, dtype=dtype, device=device)

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `count` tokens, laid out as a layer's are."""
        heads = torch.zeros(count, self.heads + 2 * self.kv_heads, self.head_dim, dtype=dtype, device=device)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return query, key, value


@dataclass(frozen=True, slots=True)
class PagedChunk:
    """`count` tokens of one sequence, after `context` tokens that are in the KV cache: the next ones of a flattened
    batch. `blocks` is the sequence's block table, integers, long enough for context + count tokens."""

    context: int
    count: int
    blocks: Sequence[int] | np.ndarray


class AttentionBatch(Protocol):
    """One flattened batch of n tokens, ready to be attended to in every layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """Writes the batch's keys and values into one layer's cache, then attends causally within each sequence.

        query [n, heads, head_dim]; key and value [n, kv_heads, head_dim]; cache [2, blocks + 1, block_size, kv_heads,
        head_dim] → [n, heads · head_dim]. Of each, one token's numbers lie together, in order.
        """
        ...


@runtime_checkable
class WarmBackend(Protocol):
    """A back end that compiles kernels at their first use."""

    def warm_up(self, cache: Tensor) -> None:
        """Uses all of them once, over one layer's cache, of which it changes nothing that is anybody's."""
        ...


@runtime_checkable
class NumbaCompiled(Protocol):
    """A back end whose kernels numba compiles: their names, as `common.cpu.jit.find` takes them."""

    kernels: frozenset[str]


class AttentionBackend(Protocol):
    """Makes batches over the paged cache that `CacheShape.new_cache` gives; `name` is its name among the options."""

    name: str

    def batch(self, chunks: Sequence[PagedChunk]) -> AttentionBatch:
        """What a batch's chunks need to know, moved to the device."""
        ...
