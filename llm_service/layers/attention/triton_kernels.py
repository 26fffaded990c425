"""Triton kernels of attention over a paged KV cache, for any GPU that Triton compiles for. Keys and values of one layer
are [blocks, block_size, kv_heads, head_dim]. Query heads that share a KV head go together. Every length comes from
memory, none from the launch: a captured graph is right for any batch that fits its metadata."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.part_kernels import first_seen, item_of, leave_sums, sequence_of, softmax_step
from llm_service.layers.gpu.scaled_kernel import e4m3


@triton.jit
def store_kernel(
    key,
    value,
    keys,
    values,
    scales,
    slots,
    key_stride,
    value_stride,
    width,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Puts one token's keys and values, `width` = kv_heads · HEAD_DIM numbers each, into its slot, with FP8 as e4m3, of
    which too large ones become the largest; where they are SCALED divided by `scales` [2, kv_heads] before. Grid
    [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    k = tl.load(key + token * key_stride + place, inside)
    v = tl.load(value + token * value_stride + place, inside)
    if SCALED:
        steps = scales + place // HEAD_DIM
        k = tl.math.div_rn(k.to(tl.float32), tl.load(steps, inside, 1.0))
        v = tl.math.div_rn(v.to(tl.float32), tl.load(steps + width // HEAD_DIM, inside, 1.0))
    if FP8:
        k, v = e4m3(k), e4m3(v)
    tl.store(keys + slot * width + place, k, inside)
    tl.store(values + slot * width + place, v, inside)


@triton.jit
def _store_int8(
    x,
    numbers,
    scales,
    token,
    slot,
    stride,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Puts one token's kv_heads · HEAD_DIM numbers into its slot, in 8 bits, as `int8_blocks.quantize` does."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    there = (heads[:, None] < kv_heads) & (dims[None, :] < HEAD_DIM)
    given = tl.load(x + token * stride + heads[:, None] * HEAD_DIM + dims[None, :], there, 0.0).to(tl.float32)
    highest = tl.max(tl.abs(given), 1)
    inverse = tl.where(highest > 0.0, 127.0 / highest, 0.0)
    block = slot // BLOCK_SIZE * (BLOCK_SIZE * kv_heads * (HEAD_DIM + 4))
    place = slot % BLOCK_SIZE * kv_heads + heads
    rounded = tl.floor(given * inverse[:, None] + 0.5).to(tl.int8)
    tl.store(numbers + block + place[:, None] * HEAD_DIM + dims[None, :], rounded, there)
    scale_places = (block + BLOCK_SIZE * kv_heads * HEAD_DIM) // 4 + place
    tl.store(scales + scale_places, highest / 127.0, heads < kv_heads)


@triton.jit
def store_int8_kernel(
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    key_stride,
    value_stride,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Puts one token's keys and values into its slot, in 8 bits. `keys` and `values` are int8 [blocks, bytes of a
    block], `key_scales` and `value_scales` the same memory as float32 (`int8_blocks`). Grid [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    _store_int8(key, keys, key_scales, token, slot, key_stride, kv_heads, BLOCK_SIZE, HEAD_DIM, HEADS, DIMS)
    _store_int8(value, values, value_scales, token, slot, value_stride, kv_heads, BLOCK_SIZE, HEAD_DIM, HEADS, DIMS)


@triton.jit
def _first_behind(position, prompt, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PROMPTS: tl.constexpr):
    """The same, or with PROMPTS the first behind a prompt of so many tokens, of which one sees all before it."""
    first = first_seen(position, WINDOW, CHUNK)
    if PROMPTS:
        first = tl.where(position < prompt, 0, first)
    return first


@triton.jit
def _near(positions, last, prompt, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PROMPTS: tl.constexpr):
    """Which of these positions [n] are no further before each row's `last` [rows] than it sees, [rows, n]."""
    near = positions[None, :] >= first_seen(last, WINDOW, CHUNK)[:, None]
    if PROMPTS:
        near = near | (positions < prompt)[None, :]
    return near


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """Scores that hold log2(e), drawn below a cap, which does not, if there is one: cap · tanh(score / cap)."""
    if SOFTCAP > 0:
        powers = tl.exp2(tl.abs(scores) * (-2.0 / SOFTCAP))
        drawn = (SOFTCAP * 1.4426950408889634) * (1.0 - powers) / (1.0 + powers)
        scores = tl.where(scores < 0, -drawn, drawn)
    return scores


@triton.jit
def _attend(
    highest,
    total,
    mixed,
    q,
    last,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,
    end,
    head,
    kv_heads,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INT8: tl.constexpr,
    prompt,
    PROMPTS: tl.constexpr,
):
    """Takes the keys of positions [begin, end) into each row's sum, BLOCK_N at a time. Every row sees all of them, but
    where it is CAUSAL: then a row sees those up to its `last`, from `first_seen` on, and with PROMPTS the first
    `prompt`. Where it is not MASKED, BLOCK_N divides their number."""
    dims = tl.arange(0, DIMS)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = positions < end
            block = tl.load(table + positions // BLOCK_SIZE, inside, 0)
        else:
            block = tl.load(table + positions // BLOCK_SIZE)
        if INT8:  # a cache may hold more than 2³¹ numbers
            line = block.to(tl.int64) * (BLOCK_SIZE * kv_heads * (HEAD_DIM + 4))
            within = positions % BLOCK_SIZE * kv_heads + head
            base = line + within * HEAD_DIM
            scale_places = (line + BLOCK_SIZE * kv_heads * HEAD_DIM) // 4 + within
        else:
            base = ((block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * kv_heads + head) * HEAD_DIM
        key_places, value_places = base[None, :] + dims[:, None], base[:, None] + dims[None, :]
        if MASKED:
            k = tl.load(keys + key_places, inside[None, :] & (dims[:, None] < HEAD_DIM), 0.0)
            v = tl.load(values + value_places, inside[:, None] & (dims[None, :] < HEAD_DIM), 0.0)
        elif HEAD_DIM < DIMS:
            k = tl.load(keys + key_places, dims[:, None] < HEAD_DIM, 0.0)
            v = tl.load(values + value_places, dims[None, :] < HEAD_DIM, 0.0)
        else:
            k = tl.load(keys + key_places)
            v = tl.load(values + value_places)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        if INT8:
            if MASKED:
                scores *= tl.load(key_scales + scale_places, inside, 0.0)[None, :]
            else:
                scores *= tl.load(key_scales + scale_places)[None, :]
        scores = _capped(scores, SOFTCAP)
        if CAUSAL:
            seen = inside[None, :] & (positions[None, :] <= last[:, None])
            if WINDOW + CHUNK > 0:
                seen = seen & _near(positions, last, prompt, WINDOW, CHUNK, PROMPTS)
            scores = tl.where(seen, scores, float("-inf"))
        elif MASKED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        highest, total, weights, fade = softmax_step(highest, total, scores, CAUSAL)
        if INT8:
            if MASKED:
                steps = tl.load(value_scales + scale_places, inside, 0.0)
            else:
                steps = tl.load(value_scales + scale_places)
            if q.dtype == tl.float16:  # a weight times a step may be too small a number
                v = v.to(tl.float32) * steps[:, None]
            else:
                weights *= steps[None, :]
        mixed = mixed * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
    return highest, total, mixed


@triton.jit(do_not_specialize=["table_stride", "items"])  # they change, and would be compiled anew
def attention_kernel(
    out,
    mixtures,
    maxima,
    sums,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    starts,
    lengths,
    prompts,
    tiles,
    parts,
    rooms,
    scale,
    query_stride,
    table_stride,
    kv_heads,
    items,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PROMPTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INT8: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A part of the context of one item, for all query heads of one KV head, in each program. Grid [parts, kv_heads];
    `scale` holds log2(e).

    An item is up to TOKENS tokens of one sequence: the only one of sequence i, where TOKENS is 1, or those from token
    tiles[i, 1] on of sequence tiles[i, 0]. The token at place r of a chunk with c tokens before it sees positions 0 … c
    + r, the last WINDOW of them where that is not 0, and those of its chunk of CHUNK positions where that is not; with
    PROMPTS the first ones as well, as many as `prompts` has of its sequence. A program has GROUP rows for each token.
    Scores are drawn below SOFTCAP, where that is not 0. With INT8 keys and values are those of `store_int8_kernel`;
    where they are SCALED, all of a head are numbers times its key scale, or its value scale.

    `parts` [items + 2] has the keys of a part, the first part of each item, and the number of parts; programs beyond
    that are there for longer contexts, and do nothing. `rooms` [items] is −1 for an item of one part, whose result goes
    to `out` [n, heads, HEAD_DIM]. Of the others each part leaves its sums as `leave_sums` has it. The softmax is the
    online one of FlashAttention (Dao et al. 2022), in base 2; contexts are split as in Flash-Decoding. Padding has no
    part.
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    if part >= tl.load(parts + 1 + items):
        return
    item = item_of(parts + 1, part, items)
    own = part - tl.load(parts + 1 + item)
    room = tl.load(rooms + item)
    sequence, first = sequence_of(item, tiles, TOKENS)
    length = tl.load(lengths + sequence)
    before = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - before
    share = tl.load(parts)
    begin = own * share
    reached = tl.minimum(length, length - count + first + TOKENS)
    end = tl.minimum(begin + share, reached)
    prompt = 0
    shared = 0
    if PROMPTS:
        prompt = tl.load(prompts + sequence)
        shared = tl.where(length - count + first < prompt, 0, tl.minimum(end, prompt))

    if SCALED:
        scale *= tl.load(key_scales + head)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    place = tl.zeros([ROWS], tl.int32)
    heads = head * GROUP + rows
    if TOKENS > 1:
        place = first + rows // GROUP
        heads = head * GROUP + rows % GROUP
    whole = ((rows < TOKENS * GROUP) & (place < count))[:, None] & (dims[None, :] < HEAD_DIM)
    token = (before + place).to(tl.int64)
    q = tl.load(query + token[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], whole, 0.0)
    last = tl.minimum(length - count + place, reached - 1)  # rows of padding see something as well
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    table = block_table + sequence * table_stride
    if PROMPTS:  # of a prompt, which every row of an answer sees
        highest, total, mixed = _attend(
            highest, total, mixed, q, last, keys, values, key_scales, value_scales, table, begin, shared, head,
            kv_heads, scale, True, False, 0, 0, SOFTCAP, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_N, PRECISION, INT8, 0, False,
        )  # fmt: skip
        begin = tl.maximum(begin, shared)
    if WINDOW + CHUNK > 0:
        begin = tl.maximum(begin, _first_behind(length - count + first, prompt, WINDOW, CHUNK, PROMPTS))
    middle = begin
    if TOKENS > 1:  # a single token's few rows are not worth the registers of two loops
        if WINDOW + CHUNK > 0:  # keys before those that every row sees
            unseen = _first_behind(length - count + first + TOKENS - 1, prompt, WINDOW, CHUNK, PROMPTS)
            early = tl.minimum(end, unseen) - begin
            begin += (tl.maximum(early, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            begin = tl.minimum(begin, end)
            highest, total, mixed = _attend(
                highest, total, mixed, q, last, keys, values, key_scales, value_scales, table, middle, begin, head,
                kv_heads, scale, True, True, WINDOW, CHUNK, SOFTCAP, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_N, PRECISION,
                INT8, prompt, PROMPTS,
            )  # fmt: skip
        plain = tl.maximum(tl.minimum(end, length - count + first + 1) - begin, 0)  # keys that every row sees
        middle = begin + plain // BLOCK_N * BLOCK_N
        highest, total, mixed = _attend(
            highest, total, mixed, q, last, keys, values, key_scales, value_scales, table, begin, middle, head,
            kv_heads, scale, False, False, 0, 0, SOFTCAP, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_N, PRECISION, INT8, 0,
            False,
        )  # fmt: skip
    highest, total, mixed = _attend(
        highest, total, mixed, q, last, keys, values, key_scales, value_scales, table, middle, end, head,
        kv_heads, scale, True, TOKENS > 1, WINDOW, CHUNK, SOFTCAP, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_N, PRECISION, INT8,
        prompt, PROMPTS,
    )  # fmt: skip

    if SCALED:
        mixed *= tl.load(value_scales + head)
    leave_sums(
        out, mixtures, maxima, sums, highest, total, mixed, whole, rows, dims, token, heads, room, own, head,
        kv_heads, TOKENS, GROUP, HEAD_DIM,
    )  # fmt: skip
