"""Decoding on a CPU, compiled by numba: each sequence's keys are read once, where they lie, along its block table.

torch has no operator that follows a block table. Gathering the context first reads and writes all of it in every layer
for every token, and one operator for each sequence costs more in starting than in computing (docs/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor


def _compiled(function: Callable[..., None]) -> Any:
    """Compiled for this processor at its first call, and kept on disk where a folder for that can be written."""
    try:
        return numba.njit(parallel=True, fastmath=True, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(parallel=True, fastmath=True, nogil=True)(function)


def _decode(out: Any, query: Any, keys: Any, values: Any, table: Any, lengths: Any, scale: Any) -> None:
    """float32 out and query [s, heads, dim], keys and values [blocks, block_size, kv_heads, dim], table int32 [s, w],
    lengths int32 [s]. One task for each sequence and KV head, whose query heads share what is read."""
    sequences, heads, dim = query.shape
    size, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    for task in numba.prange(sequences * kv_heads):
        sequence, head = task // kv_heads, task % kv_heads
        length = lengths[sequence]
        weights = np.empty((group, length), np.float32)
        for position in range(length):
            key = keys[table[sequence, position // size], position % size, head]
            for member in range(group):
                product = np.float32(0.0)
                for place in range(dim):
                    product += query[sequence, head * group + member, place] * key[place]
                weights[member, position] = product * scale
        for member in range(group):
            highest = weights[member].max()
            total = np.float32(0.0)
            for position in range(length):
                weight = np.exp(weights[member, position] - highest)
                weights[member, position] = weight
                total += weight
            for position in range(length):
                weights[member, position] /= total
            for place in range(dim):
                out[sequence, head * group + member, place] = np.float32(0.0)
        for position in range(length):
            value = values[table[sequence, position // size], position % size, head]
            for member in range(group):
                weight = weights[member, position]
                for place in range(dim):
                    out[sequence, head * group + member, place] += weight * value[place]


_kernel = _compiled(_decode)


def decode(out: Tensor, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> None:
    """See `plain.Decode`; float32."""
    scale = np.float32(query.shape[-1] ** -0.5)
    tensors = (out, query, keys, values, table, lengths)
    _kernel(*(tensor.numpy() for tensor in tensors), scale)


def use_threads(count: int) -> None:
    """How many threads the kernel takes at most."""
    numba.set_num_threads(min(count, numba.get_num_threads()))


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernel computes in this type."""
    return dtype == torch.float32
