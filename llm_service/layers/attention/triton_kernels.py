"""Triton kernels of attention over a paged KV cache, for any GPU that Triton compiles for. Keys and values of one layer
are [blocks, block_size, kv_heads, head_dim]. Where one token is decoded, query heads that share a KV head go together.
Every length comes from memory, none from the launch: a captured graph is right for any batch that fits its metadata."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kernel(key, value, keys, values, slots, key_stride, value_stride, width, WIDTH: tl.constexpr):
    """Puts one token's keys and values, `width` = kv_heads · head_dim numbers each, into its slot. Grid [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    tl.store(keys + slot * width + place, tl.load(key + token * key_stride + place, inside), inside)
    tl.store(values + slot * width + place, tl.load(value + token * value_stride + place, inside), inside)


@triton.jit
def _kv_offsets(table, positions, inside, head, kv_heads, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the rows of some positions of a sequence begin; int64, since a cache may hold more than 2³¹ numbers."""
    block = tl.load(table + positions // BLOCK_SIZE, inside, 0).to(tl.int64)
    slot = block * BLOCK_SIZE + positions % BLOCK_SIZE
    return (slot * kv_heads + head) * HEAD_DIM


@triton.jit
def _sequence_of(starts, part, sequences):
    """Which of `sequences` sequences a part is of: the last one that does not begin behind it. One without parts begins
    where the next one does."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= part
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["table_stride", "sequences"])  # they change, and would be compiled anew
def decode_kernel(
    out,
    mixtures,
    maxima,
    sums,
    query,
    keys,
    values,
    block_table,
    lengths,
    parts,
    scale,
    query_stride,
    table_stride,
    kv_heads,
    sequences,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One token of each sequence, a part of its context in each program. Grid [parts, kv_heads]; `scale` holds log2(e).

    `parts` [sequences + 2] has the keys of a part, the first part of each sequence, and the number of parts; programs
    beyond that are there for longer contexts, and do nothing. The result of a sequence of one part goes to `out`
    [n, heads, HEAD_DIM]; else each part leaves its unnormalised sum in `mixtures` [parts, heads, HEAD_DIM], with its
    maximum and its sum of weights beside it, for `combine_kernel`. The softmax is the online one of FlashAttention (Dao
    et al. 2022), in base 2; contexts are split as in Flash-Decoding. A sequence of length 0 is padding and has no part.
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    starts = parts + 1
    if part >= tl.load(starts + sequences):
        return
    sequence = _sequence_of(starts, part, sequences).to(tl.int64)
    first = tl.load(starts + sequence)
    alone = tl.load(starts + sequence + 1) == first + 1
    share = tl.load(parts)
    begin = (part - first) * share
    end = tl.minimum(begin + share, tl.load(lengths + sequence))

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = head * GROUP + rows
    whole = (rows[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    q = tl.load(query + sequence * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], whole, 0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    table = block_table + sequence * table_stride
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        base = _kv_offsets(table, positions, inside, head, kv_heads, HEAD_DIM, BLOCK_SIZE)
        k = tl.load(keys + base[None, :] + dims[:, None], inside[None, :] & (dims[:, None] < HEAD_DIM), 0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + base[:, None] + dims[None, :], inside[:, None] & (dims[None, :] < HEAD_DIM), 0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = higher

    if alone:
        row = sequence * kv_heads * GROUP + heads
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], result, whole)
    else:
        place = part.to(tl.int64) * kv_heads * GROUP + heads
        tl.store(mixtures + place[:, None] * HEAD_DIM + dims[None, :], mixed, whole)
        tl.store(maxima + place, highest, rows < GROUP)
        tl.store(sums + place, total, rows < GROUP)


@triton.jit
def combine_kernel(
    out,
    mixtures,
    maxima,
    sums,
    parts,
    split,
    heads,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Joins the parts of one head of one sequence, PARTS at a time. Grid [number of `split`, heads]: the sequences of
    several parts, −1 is padding."""
    sequence = tl.load(split + tl.program_id(0)).to(tl.int64)
    if sequence < 0:
        return
    head = tl.program_id(1)
    first = tl.load(parts + 1 + sequence)
    last = tl.load(parts + 2 + sequence)
    dims = tl.arange(0, DIMS)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIMS], tl.float32)
    for begin in range(first, last, PARTS):
        each = begin + tl.arange(0, PARTS)
        inside = each < last
        place = each.to(tl.int64) * heads + head
        peaks = tl.load(maxima + place, inside, float("-inf"))
        higher = tl.maximum(highest, tl.max(peaks, 0))
        weights = tl.exp2(peaks - higher)
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(tl.load(sums + place, inside, 0.0) * weights, 0)
        there = inside[:, None] & (dims[None, :] < HEAD_DIM)
        some = tl.load(mixtures + place[:, None] * HEAD_DIM + dims[None, :], there, 0.0)
        mixed = mixed * fade + tl.sum(some * weights[:, None], 0)
        highest = higher
    result = (mixed / total).to(out.dtype.element_ty)
    tl.store(out + (sequence * heads + head) * HEAD_DIM + dims, result, dims < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out,
    query,
    keys,
    values,
    block_table,
    starts,
    lengths,
    tiles,
    scale,
    query_stride,
    table_stride,
    kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_M tokens of one chunk, with whatever is before them in the cache. Grid [tiles, heads].

    `tiles` [t, 2] says which sequence and which of its tokens a program begins with. A token at place r of a chunk with
    c tokens before it sees positions 0 … c + r. A tile of sequence −1 is padding.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile).to(tl.int64)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    length = tl.load(lengths + sequence)
    context = length - count

    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIMS)
    whole = (rows[:, None] < count) & (dims[None, :] < HEAD_DIM)
    token = (begin + rows).to(tl.int64)
    q = tl.load(query + token[:, None] * query_stride + head * HEAD_DIM + dims[None, :], whole, 0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DIMS], tl.float32)
    table = block_table + sequence * table_stride
    end = tl.minimum(length, context + first + BLOCK_M)
    for start in range(0, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        base = _kv_offsets(table, positions, inside, head // GROUP, kv_heads, HEAD_DIM, BLOCK_SIZE)
        k = tl.load(keys + base[None, :] + dims[:, None], inside[None, :] & (dims[:, None] < HEAD_DIM), 0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = inside[None, :] & (positions[None, :] <= context + rows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + base[:, None] + dims[None, :], inside[:, None] & (dims[None, :] < HEAD_DIM), 0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = higher
    place = (token[:, None] * kv_heads * GROUP + head) * HEAD_DIM + dims[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), whole)
