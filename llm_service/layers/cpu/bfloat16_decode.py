"""Decoding over keys and values in bfloat16, compiled by numba for processors with AVX-512. They are widened in
registers; queries, weights and sums are float32. Otherwise as `decode_attention`."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Typed, compiled, inner
from common.cpu.vectors.keys import add_values, score_keys
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.powers import highest, to_powers
from llm_service.layers.attention.backend import CAUSAL, AttentionKind
from llm_service.layers.cpu.decode_attention import EVERY, parts
from llm_service.layers.cpu.pair_kernel import rounded

_ZERO = np.float32(0.0)
_TOGETHER = 8
"""Positions that `score_keys` and `add_values` take together."""
_FOUR = 4 * LANES
"""Numbers that `highest` and `to_powers` take together."""


@inner
def _spread(out: Any, x: Any, scale: Any) -> None:
    """Lays a query x [dim] out as `score_keys` takes it, times a scale."""
    for place in range(x.shape[0]):
        out[place // (2 * LANES), place % 2, place // 2 % LANES] = x[place] * scale


@inner
def _further(blocks: Any, position: Any, size: Any, length: Any) -> Any:
    """How many places behind that of a position those are lie that are taken next; 0 where there are none."""
    following = min(position + _TOGETHER, position // size * size + size)
    if following >= length:
        return 0
    return np.intp(blocks[following // size] - blocks[position // size]) * size + following % size - position % size


@inner
def _score(weights: Any, numbers: Any, keys: Any, blocks: Any, length: Any, first: Any, dim: Any) -> None:
    """weights float32 [own, group, room]: the scores of all queries, numbers [own, group, vectors, 2, 16], with the
    first `length` keys; what is behind them is overwritten with anything."""
    own, group, room = weights.shape
    size, token, row = keys.shape[1], keys.shape[2] * dim * 2, numbers[0, 0].size * FLOAT
    for begin in range(0, length, size):
        block, here = np.intp(blocks[begin // size]), min(size, length - begin)
        for place in range(0, here, _TOGETHER):
            last, at = min(_TOGETHER, here - place) - 1, keys.ctypes.data + (block * size + place) * token
            further = _further(blocks, begin + place, size, length) * token
            for head in range(own):
                where = at + (first + head) * dim * 2
                for member in range(0, group, 2):
                    score = weights.ctypes.data + ((head * group + member) * room + begin + place) * FLOAT
                    asked = numbers.ctypes.data + (head * group + member) * row
                    places = (score, room * FLOAT, asked, row, where, token, where + further)
                    if member + 1 < group:
                        score_keys(2, places, last, dim // 2)
                    else:
                        score_keys(1, places, last, dim // 2)


@inner
def _add_weighted(sums: Any, weights: Any, values: Any, blocks: Any, length: Any, first: Any, dim: Any) -> None:
    """sums [own, group, vectors, 2, 16] grow by the first `length` values, each times its weight."""
    own, group, room = weights.shape
    size, token, row = values.shape[1], values.shape[2] * dim * 2, sums[0, 0].size * FLOAT
    few = np.zeros((2, _TOGETHER), np.float32)
    for begin in range(0, length, size):
        block, here = np.intp(blocks[begin // size]), min(size, length - begin)
        for place in range(0, here, _TOGETHER):
            last, at = min(_TOGETHER, here - place) - 1, values.ctypes.data + (block * size + place) * token
            further = _further(blocks, begin + place, size, length) * token
            for head in range(own):
                where = at + (first + head) * dim * 2
                for member in range(0, group, 2):
                    share, apart = weights.ctypes.data + ((head * group + member) * room + begin + place) * FLOAT, room
                    if last + 1 < _TOGETHER:  # what follows weighs something in the next block
                        for index in range(last + 1):
                            few[0, index] = weights[head, member, begin + place + index]
                            few[1, index] = weights[head, min(member + 1, group - 1), begin + place + index]
                        few[:, last + 1 :] = _ZERO
                        share, apart = few.ctypes.data, _TOGETHER
                    total = sums.ctypes.data + (head * group + member) * row
                    places = (share, apart * FLOAT, total, row, where, token, where + further)
                    if member + 1 < group:
                        add_values(2, places, last, dim // 2)
                    else:
                        add_values(1, places, last, dim // 2)


@inner
def _attend(
    out: Any, query: Any, keys: Any, values: Any, blocks: Any, unseen: Any, length: Any, first: Any, scale: Any
) -> None:
    """float32 out and query [own, group, dim], which share `own` KV heads from `first` on, `group` each; keys and
    values as in `_decode`, of the first `length` tokens without the first `unseen`."""
    own, group, dim = out.shape
    vectors, fours = (dim + 2 * LANES - 1) // (2 * LANES), (length + _FOUR - 1) // _FOUR
    room = (fours + 1) * _FOUR
    numbers = np.zeros((own, group, vectors, 2, LANES), np.float32)
    sums = np.zeros((own, group, vectors, 2, LANES), np.float32)
    weights, totals = np.empty((own, group, room), np.float32), np.empty((own, group), np.float32)
    for head in range(own):
        for member in range(group):
            _spread(numbers[head, member], query[head, member], scale)
    _score(weights, numbers, keys, blocks, length, first, dim)
    for head in range(own):
        for member in range(group):
            weights[head, member, :unseen], weights[head, member, length:] = -np.inf, -np.inf
            scores = weights.ctypes.data + (head * group + member) * room * FLOAT
            totals[head, member] = to_powers(scores, fours, highest(scores, fours))
    _add_weighted(sums, weights, values, blocks, length, first, dim)
    for head in range(own):
        for member in range(group):
            for number in range(dim):
                part = sums[head, member, number // (2 * LANES), number % 2, number // 2 % LANES]
                out[head, member, number] = part / totals[head, member]


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
    """float32 out and query [s, kv_heads, group, dim], bits of float32 key and value uint32 [s, kv_heads, dim], bits of
    bfloat16 keys and values uint16 [blocks, block_size, kv_heads, dim], table int32 [s, w], lengths int32 [s], of which
    the last `window` positions are seen; parts divides kv_heads. `scale` includes log2 e.

    A task is one sequence's neighbouring KV heads and the query heads that share them. It first writes its token's
    keys and values. Positions count from the first block that is seen.
    """
    size, own = keys.shape[1], keys.shape[2] // parts
    for task in numba.prange(query.shape[0] * parts):
        sequence, first = np.intp(task) // parts, np.intp(task) % parts * own
        unseen = max(0, lengths[sequence] - window)
        blocks, first_seen = table[sequence, unseen // size :], unseen % size
        last = lengths[sequence] - 1 - (unseen - first_seen)
        for head in range(first, first + own):
            for place in range(query.shape[3]):
                near = rounded(key[sequence, head, place]), rounded(value[sequence, head, place])
                keys[blocks[last // size], last % size, head, place] = np.uint16(near[0] >> np.uint32(16))
                values[blocks[last // size], last % size, head, place] = np.uint16(near[1] >> np.uint32(16))
        heads = slice(first, first + own)
        given = keys, values, blocks, first_seen, last + 1, first, scale
        _attend(out[sequence, heads], query[sequence, heads], *given)


_kernel = compiled(_decode, made_of=vectors)
_heads, _bits, _cache = numba.float32[:, :, :, ::1], numba.uint32[:, :, ::1], numba.uint16[:, :, :, ::1]
TYPED = {
    "decode": Typed(
        _kernel,
        (
            *(_heads, _heads, _bits, _bits, _cache, _cache),
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
    """As `decode_attention.decode`, where keys and values of the cache are bfloat16: those of a token are rounded."""
    sequences, heads, dim = query.shape
    grouped = sequences, key.shape[1], heads // key.shape[1], dim
    out = np.empty(grouped, np.float32)
    scale = np.float32(math.log2(math.e) * kind.softmax_scale(dim))
    numbers = query.contiguous().view(grouped).numpy()
    new = (each.contiguous().numpy().view(np.uint32) for each in (key, value))
    cached = (each.view(torch.uint16).numpy() for each in (keys, values))
    at_once = parts(sequences, key.shape[1], numba.get_num_threads())
    _kernel(out, numbers, *new, *cached, table.numpy(), lengths.numpy(), kind.window or EVERY, scale, at_once)
    return torch.from_numpy(out).view(query.shape)
