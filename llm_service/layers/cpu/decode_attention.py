"""Decoding on a CPU, compiled by numba: each sequence's keys are read once, where they lie, along its block table.
torch has no operator that follows one; gathering the context first, or an operator for each sequence, costs more:
docs/design/cpu-kernels.md."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu.jit import Typed, compiled
from llm_service.layers.attention.backend import CAUSAL, AttentionKind

_ZERO = np.float32(0.0)
_TOGETHER = 4
"""Positions that are computed with at once, so that what all of them meet is read once."""
EVERY = 2**31 - 1
"""Of a window that there is none of."""
_ENOUGH = 4
"""Tasks for each thread with which one that takes longer no longer matters."""


@numba.njit(inline="always")
def _together(cache: Any, blocks: Any, begin: Any, last: Any) -> Any:
    """What a cache has at four positions from `begin` on, each [kv_heads, dim]; those behind the last stand for it."""
    size = cache.shape[1]
    p1, p2, p3 = min(begin + 1, last), min(begin + 2, last), min(begin + 3, last)
    return (
        cache[blocks[begin // size], begin % size],
        cache[blocks[p1 // size], p1 % size],
        cache[blocks[p2 // size], p2 % size],
        cache[blocks[p3 // size], p3 % size],
    )


def _decode(
    out: Any,
    query: Any,
    key: Any,
    value: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    window: Any,
    scale: Any,
    parts: Any,
) -> None:
    """float32 out and query [s, heads, dim], key and value [s, kv_heads, dim], keys and values [blocks, block_size,
    kv_heads, dim], table int32 [s, w], lengths int32 [s], of which the last `window` positions are seen; parts divides
    kv_heads.

    A task is one sequence's neighbouring KV heads, which lie side by side at each position, and the query heads that
    share them. It first writes its token's keys and values. Positions count from the first block that is seen.
    """
    sequences, heads, dim = query.shape
    size, kv_heads = keys.shape[1], keys.shape[2]
    group, own = heads // kv_heads, kv_heads // parts
    for task in numba.prange(sequences * parts):
        sequence, first = task // parts, task % parts * own
        unseen = max(0, lengths[sequence] - window)
        blocks, first_seen = table[sequence, unseen // size :], unseen % size
        last = lengths[sequence] - 1 - (unseen - first_seen)
        for head in range(first, first + own):
            for place in range(dim):
                keys[blocks[last // size], last % size, head, place] = key[sequence, head, place]
                values[blocks[last // size], last % size, head, place] = value[sequence, head, place]
        weights = np.empty((own * group, last + _TOGETHER), np.float32)
        sums = np.zeros((own * group, dim), np.float32)
        for begin in range(first_seen, last + 1, _TOGETHER):
            k0, k1, k2, k3 = _together(keys, blocks, begin, last)
            for member in range(own * group):
                head = first + member // group
                s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
                for place in range(dim):
                    number = query[sequence, first * group + member, place]
                    s0 += number * k0[head, place]
                    s1 += number * k1[head, place]
                    s2 += number * k2[head, place]
                    s3 += number * k3[head, place]
                weights[member, begin], weights[member, begin + 1] = s0 * scale, s1 * scale
                weights[member, begin + 2], weights[member, begin + 3] = s2 * scale, s3 * scale
        for member in range(own * group):
            highest, total = weights[member, first_seen : last + 1].max(), _ZERO
            for position in range(first_seen, last + 1):
                weights[member, position] = np.exp(weights[member, position] - highest)
                total += weights[member, position]
            for position in range(first_seen, last + 1):
                weights[member, position] /= total
            weights[member, last + 1 :] = _ZERO  # what stands for the last one weighs nothing
        for begin in range(first_seen, last + 1, _TOGETHER):
            v0, v1, v2, v3 = _together(values, blocks, begin, last)
            for member in range(own * group):
                head = first + member // group
                w0, w1 = weights[member, begin], weights[member, begin + 1]
                w2, w3 = weights[member, begin + 2], weights[member, begin + 3]
                for place in range(dim):
                    sums[member, place] += (
                        w0 * v0[head, place] + w1 * v1[head, place] + w2 * v2[head, place] + w3 * v3[head, place]
                    )
        for member in range(own * group):
            for place in range(dim):
                out[sequence, first * group + member, place] = sums[member, place]


_kernel = compiled(_decode)
_heads, _cache = numba.float32[:, :, ::1], numba.float32[:, :, :, ::1]
TYPED = {
    "decode": Typed(
        _kernel,
        (
            *(_heads, _heads, _heads, _heads, _cache, _cache),
            *(numba.int32[:, ::1], numba.int32[::1], numba.intp, numba.float32, numba.intp),
        ),
    )
}


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    kind: AttentionKind = CAUSAL,
) -> Tensor:
    """One token of each sequence, the last of its length: writes its key and value, and attends, [s, heads, dim].

    query float32 [s, heads, dim], key and value [s, kv_heads, dim]; keys and values [blocks, block_size, kv_heads,
    dim], along the block table int32 [s, w]; lengths int32 [s]. Each of these four lies together: the kernel is
    compiled for that alone.
    """
    out = torch.empty(query.shape, dtype=query.dtype)
    scale = np.float32(kind.softmax_scale(query.shape[-1]))
    tensors = (out, query.contiguous(), key.contiguous(), value.contiguous(), keys, values, table, lengths)
    at_once = parts(query.shape[0], key.shape[1], numba.get_num_threads())
    _kernel(*(tensor.numpy() for tensor in tensors), kind.window or EVERY, scale, at_once)
    return out


def parts(sequences: int, kv_heads: int, threads: int) -> int:
    """Into how many tasks a sequence's KV heads are divided: as few as keep all threads busy.

    >>> parts(1, 8, 2), parts(3, 8, 2), parts(8, 8, 2), parts(1, 2, 16)
    (2, 2, 1, 2)
    """
    divisors = [count for count in range(1, kv_heads + 1) if kv_heads % count == 0]
    tasks = ((count, sequences * count) for count in divisors)
    return next((count for count, all_ in tasks if all_ % threads == 0 or all_ >= _ENOUGH * threads), kv_heads)
