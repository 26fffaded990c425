"""Decoding over keys and values in bfloat16, compiled by numba for processors with AVX-512. They are widened in
registers; queries, weights and sums are float32. Otherwise as `decode_attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Typed, inner
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.keys import add_values, score_keys
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.powers import cap, highest, to_powers
from common.cpu.vectors.stored import rounded

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
    """How far behind a position's row in the cache those rows are that are read next; 0 if there are none."""
    following = min(position + _TOGETHER, position // size * size + size)
    if following >= length:
        return 0
    return np.intp(blocks[following // size] - blocks[position // size]) * size + following % size - position % size


@inner
def _seen(length: Any, count: Any, token: Any, reach: Any, size: Any) -> Any:
    """What the last `count` tokens of a sequence see, where `length` includes the last of them: the beginning of the
    block that the first token's own position is in, the first position that it sees from there, and the end; and the
    begin and end of the gap between the prompt and the window. `reach` is the window, the tokens of a chunk, the number
    of skipped positions, and the prompt tokens that are seen whatever the window."""
    window, chunk, skipped, prompt = reach
    end = length - count + 1 + token
    unseen = max(0, end - window, (skipped + end - 1) // chunk * chunk - skipped)
    if prompt:
        return 0, 0, end, min(prompt, end), max(min(prompt, end), unseen)
    begin = unseen // size * size
    return begin, unseen - begin, end - begin, 0, 0


@inner
def _score(weights: Any, numbers: Any, keys: Any, blocks: Any, length: Any, reach: Any, first: Any, dim: Any) -> None:
    """Scores of all queries with the keys that each token sees, from the block of its first key on: weights float32
    [count, own, group, room], numbers [count, own, group, vectors, 2, 16]. Places behind the last key are overwritten
    arbitrarily."""
    count, own, group, room = weights.shape
    size, step, row = keys.shape[1], keys.shape[2] * dim * 2, numbers[0, 0, 0].size * FLOAT
    for begin in range(0, length, size):
        block, here = np.intp(blocks[begin // size]), min(size, length - begin)
        for place in range(0, here, _TOGETHER):
            at = keys.ctypes.data + (block * size + place) * step
            further = _further(blocks, begin + place, size, length) * step
            for head in range(own):
                where = at + (first + head) * dim * 2
                for token in range(count):
                    own_begin, _, end, gap, late = _seen(length, count, token, reach, size)
                    position = begin + place - own_begin
                    last = min(_TOGETHER, here - place, end - position) - 1
                    if position < 0 or last < 0 or (position >= gap and position + last < late):
                        continue
                    for member in range(0, group, 2):
                        query = (token * own + head) * group + member
                        score = weights.ctypes.data + (query * room + position) * FLOAT
                        places = (
                            *(score, room * FLOAT, numbers.ctypes.data + query * row, row),
                            *(where, step, where + further),
                        )
                        if member + 1 < group:
                            score_keys(2, places, last, dim // 2)
                        else:
                            score_keys(1, places, last, dim // 2)


@inner
def _add_weighted(
    sums: Any, weights: Any, values: Any, blocks: Any, length: Any, reach: Any, first: Any, dim: Any
) -> None:
    """sums [count, own, group, vectors, 2, 16] grow by the values that each token sees, each times its weight."""
    count, own, group, room = weights.shape
    size, step, row = values.shape[1], values.shape[2] * dim * 2, sums[0, 0, 0].size * FLOAT
    few = np.zeros((2, _TOGETHER), np.float32)
    for begin in range(0, length, size):
        block, here = np.intp(blocks[begin // size]), min(size, length - begin)
        for place in range(0, here, _TOGETHER):
            at = values.ctypes.data + (block * size + place) * step
            further = _further(blocks, begin + place, size, length) * step
            for head in range(own):
                where = at + (first + head) * dim * 2
                for token in range(count):
                    own_begin, _, end, gap, late = _seen(length, count, token, reach, size)
                    position = begin + place - own_begin
                    last = min(_TOGETHER, here - place, end - position) - 1
                    if position < 0 or last < 0 or (position >= gap and position + last < late):
                        continue
                    for member in range(0, group, 2):
                        query = (token * own + head) * group + member
                        share, apart = weights.ctypes.data + (query * room + position) * FLOAT, room
                        if last + 1 < _TOGETHER:  # later positions have weights in the next block
                            for index in range(last + 1):
                                few[0, index] = weights[token, head, member, position + index]
                                few[1, index] = weights[token, head, min(member + 1, group - 1), position + index]
                            few[:, last + 1 :] = _ZERO
                            share, apart = few.ctypes.data, _TOGETHER
                        total = sums.ctypes.data + query * row
                        places = (share, apart * FLOAT, total, row, where, step, where + further)
                        if member + 1 < group:
                            add_values(2, places, last, dim // 2)
                        else:
                            add_values(1, places, last, dim // 2)


@inner
def _attend(
    out: Any,
    query: Any,
    keys: Any,
    values: Any,
    blocks: Any,
    length: Any,
    reach: Any,
    first: Any,
    scale: Any,
    softcap: Any,
) -> None:
    """Attention of a sequence's last tokens: float32 out and query [count, own, group, dim], for `own` KV heads from
    `first` on, which `group` heads each share; keys and values as in `_decode`, of `length` tokens including these."""
    count, own, group, dim = out.shape
    size, vectors = keys.shape[1], (dim + 2 * LANES - 1) // (2 * LANES)
    room = ((length + _FOUR - 1) // _FOUR + 1) * _FOUR
    numbers = np.zeros((count, own, group, vectors, 2, LANES), np.float32)
    sums = np.zeros((count, own, group, vectors, 2, LANES), np.float32)
    weights, totals = np.empty((count, own, group, room), np.float32), np.empty((count, own, group), np.float32)
    for token in range(count):
        for head in range(own):
            for member in range(group):
                _spread(numbers[token, head, member], query[token, head, member], scale)
    _score(weights, numbers, keys, blocks, length, reach, first, dim)
    for token in range(count):
        _, unseen, end, gap, late = _seen(length, count, token, reach, size)
        fours = (end + _FOUR - 1) // _FOUR
        for head in range(own):
            for member in range(group):
                scores = weights.ctypes.data + ((token * own + head) * group + member) * room * FLOAT
                if softcap > _ZERO:
                    cap(scores, fours, np.float32(1.0), softcap)
                weights[token, head, member, :unseen], weights[token, head, member, end:] = -np.inf, -np.inf
                weights[token, head, member, gap:late] = -np.inf
                totals[token, head, member] = to_powers(scores, fours, highest(scores, fours))
    _add_weighted(sums, weights, values, blocks, length, reach, first, dim)
    for token in range(count):
        for head in range(own):
            for member in range(group):
                for number in range(dim):
                    part = sums[token, head, member, number // (2 * LANES), number % 2, number // 2 % LANES]
                    out[token, head, member, number] = part / totals[token, head, member]


@inner
def _write(cache: Any, new: Any, blocks: Any, begin: Any, first: Any) -> None:
    """Rounds new [count, own, dim], bits of float32, into the cache, at positions from `begin` and heads from `first`
    on."""
    size = cache.shape[1]
    for index in range(new.shape[0]):
        here = cache[blocks[(begin + index) // size], (begin + index) % size]
        for head in range(new.shape[1]):
            for place in range(new.shape[2]):
                here[first + head, place] = np.uint16(rounded(new[index, head, place]) >> np.uint32(16))


@inner
def _decode_heads(
    task: Any, out: Any, query: Any, new: Any, cached: Any, where: Any, scale: Any, softcap: Any, parts: Any
) -> None:
    """A task of `_decode`: first writes its tokens' keys and values. Positions count from the first block that is seen;
    each token's sums from the first that it sees, whichever tokens are computed together."""
    (key, value), (keys, values), (table, lengths, ends, prompts, window, chunk) = new, cached, where
    size, own = keys.shape[1], keys.shape[2] // parts
    sequence, first = task // parts, task % parts * own
    row = np.intp(ends[sequence - 1]) if sequence else 0
    count = np.intp(ends[sequence]) - row
    before, prompt = np.intp(lengths[sequence]) - count, np.intp(prompts[sequence])
    skipped = 0 if prompt else max(0, before + 1 - window, before // chunk * chunk) // size
    blocks, length = table[sequence, skipped:], np.intp(lengths[sequence]) - skipped * size
    rows, heads = slice(row, row + count), slice(first, first + own)
    _write(keys, key[rows, heads], blocks, length - count, first)
    _write(values, value[rows, heads], blocks, length - count, first)
    reach = window, chunk, skipped * size, prompt
    given = keys, values, blocks, length, reach, first, scale, softcap
    _attend(out[rows, heads], query[rows, heads], *given)


def _decode(
    out: Any,
    query: Any,
    key: Any,
    value: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    ends: Any,
    prompts: Any,
    window: Any,
    chunk: Any,
    scale: Any,
    softcap: Any,
    parts: Any,
) -> None:
    """float32 out and query [n, kv_heads, group, dim], bits of float32 key and value uint32 [n, kv_heads, dim], bits of
    bfloat16 keys and values uint16 [blocks, block_size, kv_heads, dim], table int32 [s, w], lengths int32 [s]. A token
    sees the last `window` positions up to its own, within its chunk of `chunk` positions, and the first prompts int32
    [s] positions. ends int32 [s]: where the last tokens of each sequence end among the n. `softcap` bounds scores; 0:
    none. parts divides kv_heads. `scale` and `softcap` include log2 e.

    A task is some adjacent KV heads of one sequence and the query heads that share them.
    """
    where = table, lengths, ends, prompts, window, chunk
    given = out, query, (key, value), (keys, values), where, scale, softcap, parts
    parallel_for(_decode_heads, given, len(lengths) * parts)


_kernel = threaded(_decode, [vectors])
_heads, _bits, _cache = numba.float32[:, :, :, ::1], numba.uint32[:, :, ::1], numba.uint16[:, :, :, ::1]
TYPED = {
    "decode": Typed(
        _kernel,
        (
            *(_heads, _heads, _bits, _bits, _cache, _cache),
            *(numba.int32[:, ::1], numba.int32[::1], numba.int32[::1], numba.int32[::1]),
            *(numba.intp, numba.intp, numba.float32, numba.float32, numba.intp),
        ),
    )
}


def attend(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Sequence[Any],
    scale: float,
    softcap: float,
    parts: int,
) -> None:
    """Fills out as `decode_attention.decode` describes: out, query, key and value are contiguous float32, keys and
    values bfloat16; `where` are the kernel's arguments from its table to those before its scale."""
    grouped = len(query), key.shape[1], query.shape[1] // key.shape[1], query.shape[2]
    heads = (each.view(grouped).numpy() for each in (out, query))
    new = (each.numpy().view(np.uint32) for each in (key, value))
    cached = (each.view(torch.uint16).numpy() for each in (keys, values))
    by_twos = (np.float32(math.log2(math.e) * each) for each in (scale, softcap))
    _kernel(*heads, *new, *cached, *where, *by_twos, parts)
