"""Shared by the Triton kernels of paged attention: items and their parts, the positions that a token sees, the online
softmax, and joining the parts of a context."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def item_of(starts, part, items):
    """The item that a part belongs to: the last one that begins at or before it. An item without parts begins where the
    next one does."""
    low = 0
    high = items
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= part
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def sequence_of(item, tiles, TOKENS: tl.constexpr):
    """The sequence that an item is of, and the place of its first token in that one's chunk."""
    sequence = item.to(tl.int64)
    first = 0
    if TOKENS > 1:
        sequence = tl.load(tiles + 2 * item).to(tl.int64)
        first = tl.load(tiles + 2 * item + 1)
    return sequence, first


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a token sees with a sliding window and with chunks; 0 stands for none of either."""
    first = position - position
    if WINDOW > 0:
        first = tl.maximum(first, position + 1 - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def softmax_step(highest, total, scores, UNSEEN: tl.constexpr):
    """Adds scores [rows, n] to each row's maximum and sum of weights. Returns both, the weights, and the factor for
    earlier sums. With UNSEEN a row may not have seen any key yet."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    against = higher
    if UNSEEN:
        against = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - against[:, None])
    fade = tl.exp2(highest - against)
    return higher, total * fade + tl.sum(weights, 1), weights, fade


@triton.jit
def leave_sums(
    out,
    mixtures,
    maxima,
    sums,
    highest,
    total,
    mixed,
    whole,
    rows,
    dims,
    token,
    heads,
    room,
    own,
    head,
    kv_heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Writes the results of a program's rows, each of a `token` and one of its `heads`; only rows that are `whole`
    [rows, dims] are real. An item with one part (`room` −1) is written to `out` [n, heads, HEAD_DIM]. Part number `own`
    of any other item writes unnormalised sums to `mixtures` [room + own, kv_heads, TOKENS · GROUP, HEAD_DIM], with
    their maxima and sums of weights, for `combine_kernel`."""
    if room < 0:
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        place = token * kv_heads * GROUP + heads
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], result, whole)
    else:
        kept = ((room + own).to(tl.int64) * kv_heads + head) * (TOKENS * GROUP) + rows
        there = rows < TOKENS * GROUP
        tl.store(mixtures + kept[:, None] * HEAD_DIM + dims[None, :], mixed, whole)
        tl.store(maxima + kept, highest, there)
        tl.store(sums + kept, total, there)


@triton.jit
def combine_kernel(
    out,
    mixtures,
    maxima,
    sums,
    starts,
    tiles,
    parts,
    rooms,
    split,
    kv_heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Joins the parts of one row of an item, PARTS at a time. Grid [number of `split`, TOKENS · GROUP, kv_heads]:
    `split` has the items of several parts, −1 is padding. See `leave_sums`."""
    item = tl.load(split + tl.program_id(0))
    if item < 0:
        return
    row = tl.program_id(1)
    head = tl.program_id(2)
    sequence, first = sequence_of(item, tiles, TOKENS)
    token = tl.load(starts + sequence) + first + row // GROUP
    if token >= tl.load(starts + sequence + 1):
        return
    count = tl.load(parts + 2 + item) - tl.load(parts + 1 + item)
    room = tl.load(rooms + item)
    dims = tl.arange(0, DIMS)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIMS], tl.float32)
    for begin in range(0, count, PARTS):
        each = begin + tl.arange(0, PARTS)
        inside = each < count
        kept = ((room + each).to(tl.int64) * kv_heads + head) * (TOKENS * GROUP) + row
        peaks = tl.load(maxima + kept, inside, float("-inf"))
        higher = tl.maximum(highest, tl.max(peaks, 0))
        against = tl.where(higher == float("-inf"), 0.0, higher)  # before a window nothing is seen
        weights = tl.exp2(peaks - against)
        fade = tl.exp2(highest - against)
        total = total * fade + tl.sum(tl.load(sums + kept, inside, 0.0) * weights, 0)
        there = inside[:, None] & (dims[None, :] < HEAD_DIM)
        some = tl.load(mixtures + kept[:, None] * HEAD_DIM + dims[None, :], there, 0.0)
        mixed = mixed * fade + tl.sum(some * weights[:, None], 0)
        highest = higher
    result = (mixed / total).to(out.dtype.element_ty)
    own = (token.to(tl.int64) * kv_heads + head) * GROUP + row % GROUP
    tl.store(out + own * HEAD_DIM + dims, result, dims < HEAD_DIM)
