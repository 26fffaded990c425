"""Decode attention on a CPU, compiled by numba. Each sequence's keys are read once, in place, along its block table,
for a token and its drafts together. torch has no operator that follows a block table; gathering the context first, or
one operator per sequence, is slower: docs/design/cpu-kernels.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import LANES
from common.cpu.vectors.powers import cap
from llm_service.layers.attention.backend import CAUSAL, AttentionKind
from llm_service.layers.cpu import bfloat16_decode

_ZERO = np.float32(0.0)
_TOGETHER = 4
"""Positions that are computed at once, so that what they share is read once."""
EVERY = 2**31 - 1
"""A window or a chunk size that stands for none."""
_FOUR = 4 * LANES
"""Numbers that `cap` takes together."""
_ENOUGH = 4
"""Tasks per thread, so that a longer one does not matter."""


@inner
def first_seen(position: Any, window: Any, chunk: Any) -> Any:
    """As `AttentionKind.first_seen`; see `EVERY`."""
    return max(0, position + 1 - window, position // chunk * chunk)


@numba.njit(inline="always")
def _together(cache: Any, blocks: Any, begin: Any, last: Any) -> Any:
    """The cache rows of four positions from `begin` on, each [kv_heads, dim]; positions behind the last repeat it."""
    size = cache.shape[1]
    p1, p2, p3 = min(begin + 1, last), min(begin + 2, last), min(begin + 3, last)
    return (
        cache[blocks[begin // size], begin % size],
        cache[blocks[p1 // size], p1 % size],
        cache[blocks[p2 // size], p2 % size],
        cache[blocks[p3 // size], p3 % size],
    )


@inner
def _write(cache: Any, new: Any, blocks: Any, begin: Any, first: Any) -> None:
    """Writes new [count, own, dim] to the cache, at positions from `begin` and heads from `first` on."""
    size = cache.shape[1]
    for index in range(new.shape[0]):
        here = cache[blocks[(begin + index) // size], (begin + index) % size]
        for head in range(new.shape[1]):
            for place in range(new.shape[2]):
                here[first + head, place] = new[index, head, place]


@inner
def _cap_all(scores: Any, softcap: Any) -> None:
    """Caps scores [members, room]; room is a multiple of `_FOUR`, and what lies between the scores may be anything."""
    cap(scores.ctypes.data, np.intp(scores.size // _FOUR), np.float32(1.0), softcap)


@inner
def _softmax(weights: Any, early: Any, seen: Any, end: Any) -> None:
    """Softmax, in place, over scores before `early`, which are of the prompt, and those from `seen` to `end`."""
    highest, total = -np.float32(np.inf), _ZERO
    if early:
        highest = weights[:early].max()
    if seen < end:
        highest = max(highest, weights[seen:end].max())
    for position in range(early):
        weights[position] = np.exp(weights[position] - highest)
        total += weights[position]
    for position in range(seen, end):
        weights[position] = np.exp(weights[position] - highest)
        total += weights[position]
    for position in range(early):
        weights[position] /= total
    for position in range(seen, end):
        weights[position] /= total


@inner
def _decode_heads(
    task: Any, out: Any, query: Any, new: Any, cached: Any, where: Any, scale: Any, softcap: Any, parts: Any
) -> None:
    """One task of `_decode`; it writes its tokens' keys and values first. Positions are counted from the first block
    that is seen, and are taken in fours that begin at multiples of four, whichever tokens are computed together. Fours
    between the prompt and the first position that the first token sees behind it are skipped."""
    (key, value), (keys, values), (table, lengths, ends, prompts, window, chunk) = new, cached, where
    _, heads, dim = query.shape
    size, kv_heads = keys.shape[1], keys.shape[2]
    group, own = heads // kv_heads, kv_heads // parts
    sequence, first = task // parts, task % parts * own
    row = ends[sequence - 1] if sequence else 0
    count = ends[sequence] - row
    prompt, late = np.intp(prompts[sequence]), first_seen(np.intp(lengths[sequence]) - count, window, chunk)
    seen_from = 0 if prompt else late // _TOGETHER * _TOGETHER
    late = late if prompt else 0
    blocks, skipped = table[sequence, seen_from // size :], seen_from // size * size
    start, last, members = seen_from - skipped, lengths[sequence] - 1 - skipped, own * group
    _write(keys, key[row : row + count, first : first + own], blocks, last + 1 - count, first)
    _write(values, value[row : row + count, first : first + own], blocks, last + 1 - count, first)
    fours = (last + _TOGETHER + _FOUR - 1) // _FOUR
    weights = np.empty((count * members, fours * _FOUR), np.float32)
    sums = np.zeros((count * members, dim), np.float32)
    for begin in range(start, last + 1, _TOGETHER):
        if prompt <= begin <= late - _TOGETHER:
            continue
        k0, k1, k2, k3 = _together(keys, blocks, begin, last)
        for member in range(count * members):
            token, head = row + member // members, first + member % members // group
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            for place in range(dim):
                number = query[token, first * group + member % members, place]
                s0 += number * k0[head, place]
                s1 += number * k1[head, place]
                s2 += number * k2[head, place]
                s3 += number * k3[head, place]
            weights[member, begin], weights[member, begin + 1] = s0 * scale, s1 * scale
            weights[member, begin + 2], weights[member, begin + 3] = s2 * scale, s3 * scale
    if softcap > _ZERO:
        _cap_all(weights, softcap)
    for member in range(count * members):
        end = last + 2 - count + member // members
        early = min(prompt, end)
        seen = max(first_seen(end - 1 + skipped, window, chunk) - skipped, early)
        _softmax(weights[member], early, seen, end)
        weights[member, max(start, early) : seen] = _ZERO
        weights[member, end:] = _ZERO  # zero for positions behind the token and for repeated ones
    for begin in range(start, last + 1, _TOGETHER):
        if prompt <= begin <= late - _TOGETHER:
            continue
        v0, v1, v2, v3 = _together(values, blocks, begin, last)
        for member in range(count * members):
            head = first + member % members // group
            w0, w1 = weights[member, begin], weights[member, begin + 1]
            w2, w3 = weights[member, begin + 2], weights[member, begin + 3]
            for place in range(dim):
                sums[member, place] += (
                    w0 * v0[head, place] + w1 * v1[head, place] + w2 * v2[head, place] + w3 * v3[head, place]
                )
    for member in range(count * members):
        for place in range(dim):
            out[row + member // members, first * group + member % members, place] = sums[member, place]


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
    """float32 out and query [n, heads, dim], key and value [n, kv_heads, dim], keys and values [blocks, block_size,
    kv_heads, dim], table int32 [s, w], lengths int32 [s]. A token sees the last `window` positions up to its own,
    within its chunk of `chunk` positions, and the first prompts int32 [s] positions. ends int32 [s]: where the last
    tokens of each sequence end among the n. `softcap` bounds scores; 0: none. parts divides kv_heads.

    A task is some adjacent KV heads of one sequence, and the query heads that share them.
    """
    where = table, lengths, ends, prompts, window, chunk
    given = out, query, (key, value), (keys, values), where, scale, softcap, parts
    parallel_for(_decode_heads, given, len(lengths) * parts)


_kernel = threaded(_decode, [vectors])
_heads, _cache = numba.float32[:, :, ::1], numba.float32[:, :, :, ::1]
TYPED = {
    "decode": Typed(
        _kernel,
        (
            *(_heads, _heads, _heads, _heads, _cache, _cache),
            *(numba.int32[:, ::1], numba.int32[::1], numba.int32[::1], numba.int32[::1]),
            *(numba.intp, numba.intp, numba.float32, numba.float32, numba.intp),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Decodes:
    """The tokens that decode: `table` int32 [s, w], the block tables; `lengths` int32 [s], with these tokens; `ends`
    int32 [s], where the tokens of each sequence end among the n of a batch; `prompts` int32 [s], how many first tokens
    of each sequence are seen whatever the window."""

    table: Array
    lengths: Array
    ends: Array
    prompts: Array

    @classmethod
    def of(cls, table: Tensor, lengths: Tensor, ends: Tensor | None = None, prompts: Tensor | None = None) -> Decodes:
        """One token per sequence unless `ends` says otherwise; without `prompts`, nothing is seen behind the window."""
        each = torch.arange(1, len(lengths) + 1, dtype=torch.int32) if ends is None else ends
        kept = torch.zeros_like(lengths) if prompts is None else prompts
        return cls(*(tensor.numpy() for tensor in (table, lengths, each, kept)))


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    decodes: Decodes,
    kind: AttentionKind = CAUSAL,
) -> Tensor:
    """Writes the keys and values of the last tokens of each sequence and computes their attention, [n, heads, dim]. A
    token's result is the same to the bit in any batch.

    query float32 [n, heads, dim], key and value [n, kv_heads, dim]; keys and values [blocks, block_size, kv_heads,
    dim], float32, or bfloat16, to which new ones are then rounded.
    """
    out, scale, softcap = torch.empty(query.shape), kind.softmax_scale(query.shape[-1]), kind.softcap or 0.0
    reach = kind.sight.reach or EVERY, kind.sight.chunk or EVERY
    where = decodes.table, decodes.lengths, decodes.ends, decodes.prompts, *reach
    divided = parts(len(decodes.lengths), key.shape[1], threads_used())
    tensors = out, query.contiguous(), key.contiguous(), value.contiguous(), keys, values
    if keys.dtype == torch.bfloat16:
        bfloat16_decode.attend(*tensors, where, scale, softcap, divided)
    else:
        _kernel(*(tensor.numpy() for tensor in tensors), *where, np.float32(scale), np.float32(softcap), divided)
    return out


@functools.cache
def parts(sequences: int, kv_heads: int, threads: int) -> int:
    """Into how many tasks a sequence's KV heads are divided: as few as keep all threads busy.

    >>> parts(1, 8, 2), parts(3, 8, 2), parts(8, 8, 2), parts(1, 2, 16)
    (2, 2, 1, 2)
    """
    divisors = [count for count in range(1, kv_heads + 1) if kv_heads % count == 0]
    tasks = ((count, sequences * count) for count in divisors)
    return next((count for count, all_ in tasks if all_ % threads == 0 or all_ >= _ENOUGH * threads), kv_heads)
