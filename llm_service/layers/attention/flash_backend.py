"""Attention by the flash-attn library, if it is installed: version 3 with any block size, version 2 with multiples of
256 tokens. Only half-precision types. It does not support spans: torch computes chunks with spans."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBatch, CacheShape, PagedChunk, Span
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling
from llm_service.layers.attention.spanned import batch_with_spans

_PAGE_OF_VERSION_2 = 256

Compute = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, CacheShape], Tensor]
"""(query, keys, values, metadata, shape) → [n, heads, head_dim]."""
Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(key, value, cache, slots), as `triton_backend.store`."""


class FlashBackend:
    """Makes batches for the library; `compute` is the result of `find`."""

    name = "flash"
    tiling = Tiling(1, 1 << 20)  # the library cuts by itself

    def __init__(self, shape: CacheShape, device: torch.device, compute: Compute) -> None:
        self._shape = shape
        self._device = device
        self._compute = compute
        self._store = _store_on(device)

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        """The batch of a plan."""
        if spans:
            return batch_with_spans(self, chunks, spans, self._shape, self._device)
        return self.over(AttentionMetadata.of(chunks, self._shape.block_size, self._device))

    def over(self, metadata: AttentionMetadata) -> FlashBatch:
        """A batch over metadata that can be refilled between uses."""
        return FlashBatch(metadata, self._shape, self._compute, self._store)


@dataclass(frozen=True, slots=True)
class FlashBatch:
    """A batch of the library's varlen attention over a block table."""

    metadata: AttentionMetadata
    shape: CacheShape
    compute: Compute
    store: Store

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        """See `AttentionBatch`."""
        self.store(key, value, cache, self.metadata.slot_mapping)
        return self.compute(query, cache[0], cache[1], self.metadata, self.shape).flatten(1)


def _store_on(device: torch.device) -> Store:
    """Our kernel on a GPU, if Triton is there: torch needs three, in each layer."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from llm_service.layers.attention.triton_backend import store

        return store
    return _store_by_torch


def _store_by_torch(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    where = slots.long()
    cache[0].flatten(0, 1).index_copy_(0, where, key)
    cache[1].flatten(0, 1).index_copy_(0, where, value)


def find(block_size: int, *, softcap: bool = False) -> Compute | None:
    """The newest version of the library that is here and can read blocks of this size, and with `softcap` has soft caps
    of scores."""
    with_cache = _imported("flash_attn_interface", "flash_attn_with_kvcache")
    if with_cache is not None and (_knows_caps(with_cache) or not softcap):
        return _version_3(with_cache)
    varlen = _imported("flash_attn", "flash_attn_varlen_func") if block_size % _PAGE_OF_VERSION_2 == 0 else None
    return _version_2(varlen) if varlen is not None and (_knows_caps(varlen) or not softcap) else None


def _knows_caps(compute: Any) -> bool:
    return "softcap" in inspect.signature(compute).parameters


def _imported(module: str, name: str) -> Any:
    """None if it is missing, was built for another torch, or is a version without this function."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError, RuntimeError):  # the last two of a library that torch cannot load
        return None


def _rule(shape: CacheShape) -> dict[str, Any]:
    """The attention rule as both versions take it: causal, with a window or without."""
    before = shape.kind.sight.window - 1 if shape.kind.sight.window else -1
    rule = {"softmax_scale": shape.softmax_scale, "causal": True, "window_size": (before, 0 if before >= 0 else -1)}
    return rule if shape.kind.softcap is None else {**rule, "softcap": shape.kind.softcap}


def _version_3(with_cache: Any) -> Compute:
    def compute(query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, shape: CacheShape) -> Tensor:
        out = with_cache(
            query,
            keys,
            values,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.longest_query,
            **_rule(shape),
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended

    return compute


def _version_2(varlen: Any) -> Compute:
    def compute(query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, shape: CacheShape) -> Tensor:
        ends = metadata.seq_lens.cumsum(0, dtype=torch.int32)
        attended: Tensor = varlen(
            query,
            keys,
            values,
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=torch.nn.functional.pad(ends, (1, 0)),
            max_seqlen_q=metadata.longest_query,
            max_seqlen_k=metadata.longest,
            **_rule(shape),
            block_table=metadata.block_table,
        )
        return attended

    return compute
