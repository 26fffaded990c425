"""Kimi Delta Attention in Triton: one kernel decodes a token of each of many sequences, three compute runs of tokens.
Convolutions are those of `gdn_kernels`, and so are `steps`, `runs` and `tiles`."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.gdn_kernels import _heads, _unit
from llm_service.layers.gpu.row_kernels import _rounded


@triton.jit
def _fading(a, rate, least, BOUNDED: tl.constexpr):
    """g: the logarithm of the state's decay."""
    if BOUNDED:
        return least * tl.sigmoid(rate * a)
    return -rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))


@triton.jit
def kda_step_kernel(
    out,
    mixed,
    z,
    a,
    b,
    steps,
    recurrent,
    a_log,
    dt_bias,
    gain,
    z_row,
    a_row,
    b_row,
    eps,
    scale,
    least,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Decodes one token of a head: updates its state, and writes its output, normed and gated. Grid [s, heads]; DIMS is
    the head size, padded to a power of two; out and mixed are contiguous. With BOUNDED the logarithm of the decay is
    never below `least`."""
    row = tl.load(steps + tl.program_id(0) * 3).to(tl.int64)
    slot = tl.load(steps + tl.program_id(0) * 3 + 1).to(tl.int64)
    fresh = tl.load(steps + tl.program_id(0) * 3 + 2)
    if slot < 0:
        return
    head = tl.program_id(1)
    values: tl.constexpr = HEADS * HEAD_DIM
    dims = tl.arange(0, DIMS)
    real, place = dims < HEAD_DIM, head * HEAD_DIM + dims
    token = mixed + row * (3 * values) + place
    query = _unit(_rounded(tl.load(token, real, 0.0), out), 0) * scale
    key = _unit(_rounded(tl.load(token + values, real, 0.0), out), 0)
    value = _rounded(tl.load(token + 2 * values, real, 0.0), out)
    moved = tl.load(a + row * a_row + place, real, 0.0).to(tl.float32) + tl.load(dt_bias + place, real, 0.0)
    left = tl.exp(_fading(moved, tl.exp(tl.load(a_log + head)), least, BOUNDED))
    beta = _rounded(tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32)), b)
    states = recurrent + (slot * HEADS + head) * (HEAD_DIM * HEAD_DIM) + dims[:, None] * HEAD_DIM + dims[None, :]
    inside = real[:, None] & real[None, :]
    state = tl.load(states, inside & (fresh == 0), 0.0) * left[:, None]
    change = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * change[None, :]
    tl.store(states, state, inside)
    read = _rounded(tl.sum(state * query[:, None], 0), out)
    normal = read * tl.rsqrt(tl.sum(read * read, 0) / HEAD_DIM + eps) * tl.load(gain + dims, real, 0.0)
    gate = tl.load(z + row * z_row + place, real, 0.0).to(tl.float32)
    tl.store(out + row * values + place, (normal * tl.sigmoid(gate)).to(out.dtype.element_ty), real)


@triton.jit
def _faded(
    a, dt_bias, row, end, first, rate, least, a_row, SIZE: tl.constexpr, FULL: tl.constexpr, BOUNDED: tl.constexpr
):
    """g at places [first, first + SIZE) of these tokens, padded to FULL. Tokens behind the run's end do not decay."""
    place = tl.arange(0, FULL)
    real = place < SIZE
    inside = (row < end)[:, None] & real[None, :]
    moved = tl.load(a + row.to(tl.int64)[:, None] * a_row + (first + place)[None, :], inside, 0.0).to(tl.float32)
    moved += tl.load(dt_bias + first + place, real, 0.0)[None, :]
    return tl.where(inside, _fading(moved, rate, least, BOUNDED), 0.0)


@triton.jit
def kda_pairs_kernel(
    system,
    within,
    mixed,
    a,
    b,
    runs,
    tiles,
    a_log,
    dt_bias,
    a_row,
    b_row,
    scale,
    least,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BOUNDED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The interactions of NEAR of a tile's tokens with all tokens up to each of them, with decay: their rows of the
    system whose solution is the changes of the state, and how much of each change they read. Pairs among the NEAR
    tokens are multiplied place by place; pairs with earlier tokens by way of the decay up to the first of the NEAR
    tokens. Grid [t, heads, TILE / NEAR]; float32 system and within [t, heads, TILE, TILE]."""
    head, block, run = tl.program_id(1), tl.program_id(2), tl.load(tiles + tl.program_id(0) * 3)
    if run < 0:
        return
    end, first = tl.load(runs + run * 5 + 1), tl.load(tiles + tl.program_id(0) * 3 + 1)
    channels: tl.constexpr = 3 * HEADS * HEAD_DIM
    i, j = tl.arange(0, NEAR), tl.arange(0, TILE)
    row, own = first + j, first + block * NEAR + i
    before, rate = (j < block * NEAR)[:, None], tl.exp(tl.load(a_log + head))
    query_squares, key_squares = tl.zeros((NEAR,), tl.float32), tl.zeros((NEAR,), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)
    reads, writes = tl.zeros((NEAR, TILE), tl.float32), tl.zeros((NEAR, TILE), tl.float32)
    for part in tl.static_range(0, DIMS, PART):
        place = head * HEAD_DIM + part
        query = _rounded(_heads(mixed, own, end, place, channels, HEAD_DIM - part, PART), a)
        key = _rounded(_heads(mixed, own, end, HEADS * HEAD_DIM + place, channels, HEAD_DIM - part, PART), a)
        others = _rounded(_heads(mixed, row, end, HEADS * HEAD_DIM + place, channels, HEAD_DIM - part, PART), a)
        query_squares += tl.sum(query * query, 1)
        key_squares += tl.sum(key * key, 1)
        squares += tl.sum(others * others, 1)
        g = _faded(a, dt_bias, row, end, place, rate, least, a_row, HEAD_DIM - part, PART, BOUNDED)
        between = tl.sum(tl.where(before, g, 0.0), 0)
        far = others * tl.exp(tl.where(before, between[None, :] - tl.cumsum(g, 0), float("-inf")))
        g = _faded(a, dt_bias, own, end, place, rate, least, a_row, HEAD_DIM - part, PART, BOUNDED)
        total = tl.cumsum(g, 0)
        left = tl.exp(total)
        reads += tl.dot(query * left, tl.trans(far), input_precision=PRECISION)
        writes += tl.dot(key * left, tl.trans(far), input_precision=PRECISION)
        for other in range(NEAR):
            its = (i == other)[:, None]
            up_to, with_key = tl.sum(tl.where(its, total, 0.0), 0), tl.sum(tl.where(its, key, 0.0), 0)
            seen = tl.exp(tl.where((i >= other)[:, None], total - up_to[None, :], float("-inf"))) * with_key[None, :]
            here = (j == block * NEAR + other)[None, :]
            reads += tl.where(here, tl.sum(query * seen, 1)[:, None], 0.0)
            writes += tl.where(here, tl.sum(key * seen, 1)[:, None], 0.0)
    real, factor = own < end, tl.rsqrt(squares + 1e-6)[None, :]
    beta = _rounded(tl.sigmoid(tl.load(b + own.to(tl.int64) * b_row + head, real, 0.0).to(tl.float32)), b)
    beta = tl.where(real, beta, 0.0)
    rows = (tl.program_id(0).to(tl.int64) * HEADS + head) * (TILE * TILE) + (block * NEAR + i)[:, None] * TILE
    tl.store(within + rows + j[None, :], reads * (scale * tl.rsqrt(query_squares + 1e-6))[:, None] * factor)
    tl.store(system + rows + j[None, :], writes * (beta * tl.rsqrt(key_squares + 1e-6))[:, None] * factor)


@triton.jit
def kda_fade_kernel(
    mixed,
    writes,
    left,
    a,
    runs,
    tiles,
    a_log,
    dt_bias,
    a_row,
    scale,
    least,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BOUNDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The vectors by which a tile's tokens read and change the state before the tile. Their queries and keys in `mixed`
    are normed and decayed in place, from the tile's beginning; `writes` float32 [n, values] are keys decayed up to the
    tile's end; `left` float32 [t, values] is the decay of the state over the tile. Grid [t, heads]."""
    head, run = tl.program_id(1), tl.load(tiles + tl.program_id(0) * 3)
    if run < 0:
        return
    values: tl.constexpr = HEADS * HEAD_DIM
    end, place = tl.load(runs + run * 5 + 1), head * HEAD_DIM
    row, k = tl.load(tiles + tl.program_id(0) * 3 + 1) + tl.arange(0, TILE), tl.arange(0, DIMS)
    real = (row < end)[:, None] & (k < HEAD_DIM)[None, :]
    rate = tl.exp(tl.load(a_log + head))
    g = _faded(a, dt_bias, row, end, place, rate, least, a_row, HEAD_DIM, DIMS, BOUNDED)
    total, last = tl.cumsum(g, 0), tl.sum(g, 0)
    tl.store(left + tl.program_id(0).to(tl.int64) * values + place + k, tl.exp(last), k < HEAD_DIM)
    own = row.to(tl.int64)[:, None] * values + place + k[None, :]
    queries = mixed + row.to(tl.int64)[:, None] * (3 * values) + place + k[None, :]
    query = _unit(_rounded(tl.load(queries, real, 0.0), a), 1) * scale
    tl.store(queries, query * tl.exp(total), real)
    key = _unit(_rounded(tl.load(queries + values, real, 0.0), a), 1)
    tl.store(queries + values, key * tl.exp(total), real)
    tl.store(writes + own, key * tl.exp(last[None, :] - total), real)


@triton.jit
def kda_scan_kernel(
    out,
    inverse,
    within,
    mixed,
    writes,
    left,
    a,
    b,
    runs,
    tiles,
    recurrent,
    b_row,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes a run's tiles in order through PART columns of a head's state, which stays on the multiprocessor as two
    halves: the operands of a product with the whole state do not fit into registers. `mixed`, `writes` and `left` are
    those of `kda_fade_kernel`. Grid [r, heads, HEAD_DIM / PART]; out [n, values] is the output before norm and gate."""
    run, head = runs + tl.program_id(0) * 5, tl.program_id(1)
    begin, end, slot = tl.load(run), tl.load(run + 1), tl.load(run + 2).to(tl.int64)
    fresh, tile = tl.load(run + 3), tl.load(run + 4)
    if slot < 0:
        return
    values: tl.constexpr = HEADS * HEAD_DIM
    rest: tl.constexpr = HEAD_DIM - HALF
    k, v = tl.arange(0, HALF), tl.program_id(2) * PART + tl.arange(0, PART)
    i, j, place = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :], head * HEAD_DIM
    real, more = (k < HEAD_DIM)[:, None] & (v < HEAD_DIM)[None, :], (k < rest)[:, None] & (v < HEAD_DIM)[None, :]
    within_slot = head * (HEAD_DIM * HEAD_DIM) + k[:, None] * HEAD_DIM + v[None, :]
    states = recurrent + slot * (values * HEAD_DIM) + within_slot
    one = tl.load(states, real & (fresh == 0), 0.0)
    two = tl.load(states + HALF * HEAD_DIM, more & (fresh == 0), 0.0)
    for first in range(begin, end, TILE):
        row = first + tl.arange(0, TILE)
        inside = (row < end)[:, None] & (v < HEAD_DIM)[None, :]
        key = _heads(mixed, row, end, values + place, 3 * values, HEAD_DIM, HALF)
        known = tl.dot(key, one, input_precision=PRECISION)
        key = _heads(mixed, row, end, values + place + HALF, 3 * values, rest, HALF)
        known += tl.dot(key, two, input_precision=PRECISION)
        beta = _rounded(tl.sigmoid(tl.load(b + row.to(tl.int64) * b_row + head, row < end, 0.0).to(tl.float32)), b)
        value_place = row.to(tl.int64)[:, None] * (3 * values) + 2 * values + place + v[None, :]
        value = _rounded(tl.load(mixed + value_place, inside, 0.0), a)
        own = (tile.to(tl.int64) * HEADS + head) * (TILE * TILE) + i * TILE + j
        change = tl.dot(tl.load(inverse + own), (value - known) * beta[:, None], input_precision=PRECISION)
        query = _heads(mixed, row, end, place, 3 * values, HEAD_DIM, HALF)
        read = tl.dot(query, one, input_precision=PRECISION)
        query = _heads(mixed, row, end, place + HALF, 3 * values, rest, HALF)
        read += tl.dot(query, two, input_precision=PRECISION)
        read += tl.dot(tl.load(within + own), change, input_precision=PRECISION)
        out_place = row.to(tl.int64)[:, None] * values + place + v[None, :]
        tl.store(out + out_place, read.to(out.dtype.element_ty), inside)
        remains = left + tile.to(tl.int64) * values + place + k
        key = _heads(writes, row, end, place, values, HEAD_DIM, HALF)
        one *= tl.load(remains, k < HEAD_DIM, 0.0)[:, None]
        one += tl.dot(tl.trans(key), change, input_precision=PRECISION)
        key = _heads(writes, row, end, place + HALF, values, rest, HALF)
        two *= tl.load(remains + HALF, k < rest, 0.0)[:, None]
        two += tl.dot(tl.trans(key), change, input_precision=PRECISION)
        copy = tl.load(tiles + tile * 3 + 2).to(tl.int64)
        copies = recurrent + copy * (values * HEAD_DIM) + within_slot
        tl.store(copies, one, real & (copy >= 0))
        tl.store(copies + HALF * HEAD_DIM, two, more & (copy >= 0))
        tile += 1
    tl.store(states, one, real)
    tl.store(states + HALF * HEAD_DIM, two, more)
