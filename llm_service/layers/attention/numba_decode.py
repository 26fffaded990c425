"""Decoding on a CPU, compiled by numba: each sequence's keys are read once, where they lie, along its block table.

torch has no operator that follows a block table. Gathering the context first reads and writes all of it in every layer
for every token, and one operator for each sequence costs more in starting than in computing (docs/PERFORMANCE.md).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.kernels.jit import compiled


def _decode(
    out: Any, query: Any, key: Any, value: Any, keys: Any, values: Any, table: Any, lengths: Any, scale: Any
) -> None:
    """float32 out and query [s, heads, dim], key and value [s, kv_heads, dim], keys and values [blocks, block_size,
    kv_heads, dim], table int32 [s, w], lengths int32 [s]. One task for each sequence and KV head, whose query heads
    share what is read; it first writes its token's key and value."""
    sequences, heads, dim = query.shape
    size, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    for task in numba.prange(sequences * kv_heads):
        sequence, head = task // kv_heads, task % kv_heads
        length = lengths[sequence]
        block, offset = table[sequence, (length - 1) // size], (length - 1) % size
        for place in range(dim):
            keys[block, offset, head, place] = key[sequence, head, place]
            values[block, offset, head, place] = value[sequence, head, place]
        weights = np.empty((group, length), np.float32)
        for position in range(length):
            known = keys[table[sequence, position // size], position % size, head]
            for member in range(group):
                product = np.float32(0.0)
                for place in range(dim):
                    product += query[sequence, head * group + member, place] * known[place]
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
            known = values[table[sequence, position // size], position % size, head]
            for member in range(group):
                weight = weights[member, position]
                for place in range(dim):
                    out[sequence, head * group + member, place] += weight * known[place]


_kernel = compiled(_decode)


def decode(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """See `plain.Decode`; float32. Numbers that do not lie together would not be computed with as vectors."""
    out = torch.empty(query.shape)
    scale = np.float32(query.shape[-1] ** -0.5)
    tensors = (out, query.contiguous(), key, value, keys, values, table, lengths)
    _kernel(*(tensor.numpy() for tensor in tensors), scale)
    return out
