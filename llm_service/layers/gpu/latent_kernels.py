"""Triton kernels of attention over a paged cache of latents. There is one KV head, and the first numbers of its keys
are its values, so both are read once. Otherwise as `triton_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.part_kernels import first_seen, item_of, leave_sums, sequence_of, softmax_step

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_latents_kernel(key, keys, slots, key_stride, width, WIDTH: tl.constexpr):
    """Puts one token's `width` numbers into its slot. Grid [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    tl.store(keys + slot * width + place, tl.load(key + token * key_stride + place, inside), inside)


@triton.jit
def _attend_to_latents(
    highest,
    total,
    mixed,
    q,
    q_behind,
    last,
    keys,
    table,
    begin,
    end,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    BEHIND: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_BEHIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the keys of positions [begin, end) to the online softmax of each row, BLOCK_N at a time. Each key has RANK
    numbers, which are also values, and BEHIND more. If MASKED, a row sees positions from `first_seen` to its `last`;
    otherwise every row sees all of them, and BLOCK_N divides their number."""
    dims = tl.arange(0, DIMS)
    behind = tl.arange(0, DIMS_BEHIND)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        block = tl.load(table + positions // BLOCK_SIZE, inside, 0)
        slot = block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE  # a cache may hold more than 2³¹ numbers
        base = slot * (RANK + BEHIND)
        v = tl.load(keys + base[:, None] + dims[None, :], inside[:, None] & (dims < RANK)[None, :], 0.0)
        scores = tl.dot(q, tl.trans(v), input_precision=PRECISION)
        if BEHIND > 0:
            k_behind = tl.load(
                keys + base[None, :] + RANK + behind[:, None], inside[None, :] & (behind < BEHIND)[:, None], 0.0
            )
            scores = tl.dot(q_behind, k_behind, scores, input_precision=PRECISION)
        scores = scores * scale
        if MASKED:
            seen = inside[None, :] & (positions[None, :] <= last[:, None])
            if WINDOW + CHUNK > 0:
                seen = seen & (positions[None, :] >= first_seen(last, WINDOW, CHUNK)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        highest, total, weights, fade = softmax_step(highest, total, scores, True)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return highest, total, mixed


@triton.jit(do_not_specialize=["table_stride", "items"])  # they change; otherwise each new value compiles
def latent_kernel(
    out,
    mixtures,
    maxima,
    sums,
    query,
    keys,
    sinks,
    block_table,
    starts,
    lengths,
    tiles,
    parts,
    rooms,
    scale,
    query_stride,
    table_stride,
    head_groups,
    items,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    BEHIND: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_BEHIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one item's query heads, GROUP per program, over a part of the context. Grid [parts, head_groups];
    query [n, head_groups · GROUP, RANK + BEHIND], out [n, head_groups · GROUP, RANK]. With SINKS, `sinks` float32
    [head_groups · GROUP] are attention sinks, which only add to the softmax's denominator. The rest is as in
    `attention_kernel`, with a group of heads in the place of the heads that share a KV head."""
    part = tl.program_id(0)
    group = tl.program_id(1)
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
    if WINDOW + CHUNK > 0:
        begin = tl.maximum(begin, first_seen(length - count + first, WINDOW, CHUNK))

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    behind = tl.arange(0, DIMS_BEHIND)
    place = first + rows // GROUP
    heads = group * GROUP + rows % GROUP
    real = (rows < TOKENS * GROUP) & (place < count)
    token = (before + place).to(tl.int64)
    base = query + token * query_stride + heads * (RANK + BEHIND)
    whole = real[:, None] & (dims < RANK)[None, :]
    q = tl.load(base[:, None] + dims[None, :], whole, 0.0)
    q_behind = tl.load(base[:, None] + RANK + behind[None, :], real[:, None] & (behind < BEHIND)[None, :], 0.0)
    last = tl.minimum(length - count + place, reached - 1)  # rows of padding see something as well
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    if SINKS:  # of several parts of a context the first has them
        highest = tl.where(own == 0, tl.load(sinks + heads, real, 0.0) * _LOG2_E, highest)
        total = tl.where(own == 0, 1.0, total)
    table = block_table + sequence * table_stride
    middle = begin
    if TOKENS > 1:  # a single token's few rows are not worth the registers of two loops
        if WINDOW + CHUNK > 0:  # keys before those that every row sees
            early = tl.minimum(end, first_seen(length - count + first + TOKENS - 1, WINDOW, CHUNK)) - begin
            begin += (tl.maximum(early, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            begin = tl.minimum(begin, end)
            highest, total, mixed = _attend_to_latents(
                highest, total, mixed, q, q_behind, last, keys, table, middle, begin, scale,
                True, WINDOW, CHUNK, RANK, BEHIND, DIMS, DIMS_BEHIND, BLOCK_SIZE, BLOCK_N, PRECISION,
            )  # fmt: skip
        plain = tl.maximum(tl.minimum(end, length - count + first + 1) - begin, 0)  # keys that every row sees
        middle = begin + plain // BLOCK_N * BLOCK_N
        highest, total, mixed = _attend_to_latents(
            highest, total, mixed, q, q_behind, last, keys, table, begin, middle, scale,
            False, 0, 0, RANK, BEHIND, DIMS, DIMS_BEHIND, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
    highest, total, mixed = _attend_to_latents(
        highest, total, mixed, q, q_behind, last, keys, table, middle, end, scale,
        True, WINDOW, CHUNK, RANK, BEHIND, DIMS, DIMS_BEHIND, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip

    leave_sums(
        out, mixtures, maxima, sums, highest, total, mixed, whole, rows, dims, token, heads, room, own, group,
        head_groups, TOKENS, GROUP, RANK,
    )  # fmt: skip
