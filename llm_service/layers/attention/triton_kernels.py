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


@triton.jit(do_not_specialize=["table_stride"])  # it changes from batch to batch, and would be compiled anew
def decode_kernel(
    out,
    parts,
    maxima,
    sums,
    query,
    keys,
    values,
    block_table,
    lengths,
    scale,
    query_stride,
    table_stride,
    kv_heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One token of each sequence. Grid [sequences, kv_heads, SPLITS]; `scale` holds log2(e).

    With one split the result goes to `out` [n, heads, HEAD_DIM]; else each split leaves its unnormalised sum in `parts`
    [n, heads, SPLITS, HEAD_DIM], with its maximum and its sum of weights beside it, for `combine_kernel`. The softmax
    is the online one of FlashAttention (Dao et al. 2022), in base 2; contexts are split as in Flash-Decoding. A
    sequence of length 0 is padding: it reads nothing and writes nothing.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence)
    if length == 0:
        return
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)

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

    row = sequence * kv_heads * GROUP + heads
    if SPLITS == 1:
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], result, whole)
    else:
        part = row * SPLITS + split
        tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], mixed, whole)
        tl.store(maxima + part, highest, rows < GROUP)
        tl.store(sums + part, total, rows < GROUP)


@triton.jit
def combine_kernel(
    out,
    parts,
    maxima,
    sums,
    lengths,
    heads,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins the splits of one head of one sequence. Grid [sequences, heads].

    A split past the end of its sequence has the maximum −∞ and so the weight 0.
    """
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(lengths + sequence) == 0:
        return
    row = sequence * heads + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    highest = tl.load(maxima + row * SPLITS + splits)
    fade = tl.exp2(highest - tl.max(highest, 0))
    total = tl.sum(tl.load(sums + row * SPLITS + splits) * fade, 0)
    place = (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    part = tl.load(parts + place, dims[None, :] < HEAD_DIM, 0.0)
    result = tl.sum(part * fade[:, None], 0) / total
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), dims < HEAD_DIM)


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
