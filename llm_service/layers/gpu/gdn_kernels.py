"""Gated delta nets in Triton: two kernels decode one token of each of many sequences, five kernels compute runs of
tokens.

`steps` are int32 [s, 3] (row, slot, fresh); `runs` int32 [r, 5] (begin, end, slot, fresh, first tile); `tiles` int32
[t, 3] (run, first token, copy) of 64 tokens each, those of one run in order. `copy` is a slot that also gets the state
behind the tile; below 0 there is none. A step or run whose slot is below 0, or a tile whose run is, is padding. Rows of
`qkv`, `z`, `a` and `b` are `*_row` elements apart; `mixed` (the convolved rows) and `out` are contiguous. Intermediate
results are rounded where torch's operators would round them, as in `row_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.row_kernels import _rounded


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _unit(x, AXIS: tl.constexpr):
    """Vectors along an axis, divided by their norms; zero vectors stay zero."""
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6), AXIS)


@triton.jit
def _decay(a, a_log, dt_bias):
    """g: the logarithm of the state's decay."""
    x = a + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def conv_step_kernel(
    mixed,
    qkv,
    steps,
    convolution,
    conv,
    bias,
    qkv_row,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Convolves one token of each of s sequences, through SiLU if SILU, and advances their convolution states. Grid [s,
    channels / BLOCK]; convolution [slots, channels, WIDTH − 1], conv [channels, WIDTH], bias [channels], which is read
    only with BIAS."""
    row = tl.load(steps + tl.program_id(0) * 3).to(tl.int64)
    slot = tl.load(steps + tl.program_id(0) * 3 + 1).to(tl.int64)
    fresh = tl.load(steps + tl.program_id(0) * 3 + 2)
    if slot < 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    known = inside & (fresh == 0)
    own = tl.load(qkv + row * qkv_row + channel, inside, 0.0)
    state = convolution + (slot * channels + channel) * (WIDTH - 1)
    total = own.to(tl.float32) * tl.load(conv + channel * WIDTH + WIDTH - 1, inside, 0.0).to(tl.float32)
    for place in tl.static_range(WIDTH - 1):
        number = tl.load(state + place, known, 0.0)
        total += number.to(tl.float32) * tl.load(conv + channel * WIDTH + place, inside, 0.0).to(tl.float32)
        if place > 0:
            tl.store(state + place - 1, number, inside)
    tl.store(state + WIDTH - 2, own, inside)
    if BIAS:
        total += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    result = _rounded(total, mixed)
    if SILU:
        result = _silu(result)
    tl.store(mixed + row * channels + channel, result.to(mixed.dtype.element_ty), inside)


@triton.jit
def step_kernel(
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
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Decodes one token of a value head: updates its state, and writes its output, normed and gated. Grid [s, value
    heads]; KEYS and VALUES are the head sizes, padded to powers of two."""
    row = tl.load(steps + tl.program_id(0) * 3).to(tl.int64)
    slot = tl.load(steps + tl.program_id(0) * 3 + 1).to(tl.int64)
    fresh = tl.load(steps + tl.program_id(0) * 3 + 2)
    if slot < 0:
        return
    head = tl.program_id(1)
    heads: tl.constexpr = KEY_HEADS * GROUP
    k, v = tl.arange(0, KEYS), tl.arange(0, VALUES)
    real_k, real_v = k < KEY_DIM, v < VALUE_DIM
    token = mixed + row * (2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM)
    query = _unit(tl.load(token + head // GROUP * KEY_DIM + k, real_k, 0.0).to(tl.float32), 0) * scale
    key = _unit(tl.load(token + (KEY_HEADS + head // GROUP) * KEY_DIM + k, real_k, 0.0).to(tl.float32), 0)
    value = tl.load(token + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v, real_v, 0.0).to(tl.float32)
    decay = _decay(
        tl.load(a + row * a_row + head).to(tl.float32),
        tl.load(a_log + head).to(tl.float32),
        tl.load(dt_bias + head).to(tl.float32),
    )
    beta = _rounded(tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32)), b)
    place = (slot * heads + head) * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    real = real_k[:, None] & real_v[None, :]
    state = tl.load(recurrent + place, real & (fresh == 0), 0.0) * tl.exp(decay)
    change = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * change[None, :]
    tl.store(recurrent + place, state, real)
    read = _rounded(tl.sum(state * query[:, None], 0), out)
    normal = _rounded(read * tl.rsqrt(tl.sum(read * read, 0) / VALUE_DIM + eps), out)
    normal = _rounded(normal * tl.load(gain + v, real_v, 0.0).to(tl.float32), out)
    gate = tl.load(z + row * z_row + head * VALUE_DIM + v, real_v, 0.0).to(tl.float32)
    result = normal * _silu(gate)
    tl.store(out + (row * heads + head) * VALUE_DIM + v, result.to(out.dtype.element_ty), real_v)


@triton.jit
def conv_run_kernel(
    mixed,
    qkv,
    runs,
    tiles,
    convolution,
    conv,
    bias,
    qkv_row,
    channels,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Convolves the tokens of runs, through SiLU if SILU, continuing from the sequences' convolution states, and writes
    the convolution state of a tile's copy. Grid [t, channels / BLOCK]."""
    index = tl.load(tiles + tl.program_id(0) * 3)
    if index < 0:
        return
    run = runs + index * 5
    begin, end, slot = tl.load(run), tl.load(run + 1), tl.load(run + 2).to(tl.int64)
    fresh = tl.load(run + 3)
    first, copy = tl.load(tiles + tl.program_id(0) * 3 + 1), tl.load(tiles + tl.program_id(0) * 3 + 2).to(tl.int64)
    row = first + tl.arange(0, TILE)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    inside = (row < end)[:, None] & real[None, :]
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for place in tl.static_range(WIDTH):
        seen = row + (place - (WIDTH - 1))
        weight = tl.load(conv + channel * WIDTH + place, real, 0.0).to(tl.float32)
        here = inside & (seen >= begin)[:, None]
        number = tl.load(qkv + seen.to(tl.int64)[:, None] * qkv_row + channel[None, :], here, 0.0).to(tl.float32)
        before = inside & (seen < begin)[:, None] & (fresh == 0)
        known = convolution + (slot * channels + channel)[None, :] * (WIDTH - 1)
        number += tl.load(known + (seen - begin + WIDTH - 1)[:, None], before, 0.0).to(tl.float32)
        total += number * weight[None, :]
    if BIAS:
        total += tl.load(bias + channel, real, 0.0).to(tl.float32)[None, :]
    result = _rounded(total, mixed)
    if SILU:
        result = _silu(result)
    tl.store(mixed + row.to(tl.int64)[:, None] * channels + channel[None, :], result.to(mixed.dtype.element_ty), inside)
    for place in tl.static_range(WIDTH - 1):
        seen = first + TILE - (WIDTH - 1) + place
        number = tl.load(qkv + seen.to(tl.int64) * qkv_row + channel, real & (copy >= 0), 0.0)
        tl.store(convolution + (copy * channels + channel) * (WIDTH - 1) + place, number, real & (copy >= 0))


@triton.jit
def conv_keep_kernel(qkv, runs, convolution, qkv_row, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the last tokens of runs as convolution states, after `conv_run_kernel` has read the previous ones. Grid
    [r, channels / BLOCK]."""
    run = runs + tl.program_id(0) * 5
    begin, end, slot = tl.load(run), tl.load(run + 1), tl.load(run + 2).to(tl.int64)
    fresh = tl.load(run + 3)
    if slot < 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    state = convolution + (slot * channels + channel) * (WIDTH - 1)
    for place in tl.static_range(WIDTH - 1):  # reads lie behind writes
        seen = end - (WIDTH - 1) + place
        number = tl.load(qkv + seen.to(tl.int64) * qkv_row + channel, inside & (seen >= begin), 0.0)
        before = tl.load(state + (seen - begin + WIDTH - 1), inside & (seen < begin) & (fresh == 0), 0.0)
        tl.store(state + place, tl.where(seen >= begin, number, before), inside)


@triton.jit
def _gates(a, b, a_log, dt_bias, row, end, head, a_row, b_row):
    """g, summed over a tile's tokens, and β. Tokens behind the run's end neither decay the state nor write to it."""
    real = row < end
    place = row.to(tl.int64)
    decay = _decay(
        tl.load(a + place * a_row + head, real, 0.0).to(tl.float32),
        tl.load(a_log + head).to(tl.float32),
        tl.load(dt_bias + head).to(tl.float32),
    )
    beta = _rounded(tl.sigmoid(tl.load(b + place * b_row + head, real, 0.0).to(tl.float32)), b)
    return tl.cumsum(tl.where(real, decay, 0.0), 0), tl.where(real, beta, 0.0)


@triton.jit
def _heads(mixed, row, end, first, channels, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Numbers [first, first + SIZE) of a tile's tokens."""
    place = tl.arange(0, FULL)
    inside = (row < end)[:, None] & (place < SIZE)[None, :]
    return tl.load(mixed + row.to(tl.int64)[:, None] * channels + (first + place)[None, :], inside, 0.0)


@triton.jit
def _with_row(solved, columns, row, i, j):
    """Adds one row to the inverse of a small triangular system, from the rows before it. `columns` is the system,
    transposed, above the diagonal."""
    its = tl.sum(tl.where(j == row, columns, 0.0), 1)
    return tl.where(i == row, solved - tl.sum(its[:, None] * solved, 0)[None, :], solved)


@triton.jit
def invert_kernel(system, tiles, HEADS: tl.constexpr, NEAR: tl.constexpr, EXACT: tl.constexpr):
    """Inverts unit lower triangular systems float32 [t, heads, 4 · NEAR, 4 · NEAR] in place. Only the elements below
    the diagonals are read; those above are zero. Grid [t, heads].

    The blocks of NEAR unknowns on the diagonal are inverted row by row. Below them, X[n, m] = −X[n, n] · Σ A[n, k] X[k,
    m] for k from m to n − 1. Summing powers of the system would be shorter to write, but loses all digits where keys
    are alike; inverting the whole system row by row needs more registers than there are.
    """
    TILE: tl.constexpr = 4 * NEAR
    down: tl.constexpr = NEAR * TILE
    if tl.load(tiles + tl.program_id(0) * 3) < 0:
        return
    i, j = tl.arange(0, NEAR)[:, None], tl.arange(0, NEAR)[None, :]
    first = system + (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * (TILE * TILE)
    columns, upper = first + j * TILE + i, i < j
    columns_0, columns_1 = tl.load(columns, upper, 0.0), tl.load(columns + (down + NEAR), upper, 0.0)
    columns_2 = tl.load(columns + 2 * (down + NEAR), upper, 0.0)
    columns_3 = tl.load(columns + 3 * (down + NEAR), upper, 0.0)
    x00 = tl.where(i == j, 1.0, 0.0)
    x11, x22, x33 = x00, x00, x00
    for row in range(1, NEAR):
        x00 = _with_row(x00, columns_0, row, i, j)
        x11 = _with_row(x11, columns_1, row, i, j)
        x22 = _with_row(x22, columns_2, row, i, j)
        x33 = _with_row(x33, columns_3, row, i, j)
    place = first + i * TILE + j
    row_1, row_2, row_3 = place + down, place + 2 * down, place + 3 * down
    x10 = -tl.dot(x11, tl.dot(tl.load(row_1), x00, input_precision=EXACT), input_precision=EXACT)
    a21 = tl.load(row_2 + NEAR)
    x21 = -tl.dot(x22, tl.dot(a21, x11, input_precision=EXACT), input_precision=EXACT)
    total = tl.dot(tl.load(row_2), x00, input_precision=EXACT) + tl.dot(a21, x10, input_precision=EXACT)
    x20 = -tl.dot(x22, total, input_precision=EXACT)
    a31, a32 = tl.load(row_3 + NEAR), tl.load(row_3 + 2 * NEAR)
    x32 = -tl.dot(x33, tl.dot(a32, x22, input_precision=EXACT), input_precision=EXACT)
    total = tl.dot(a31, x11, input_precision=EXACT) + tl.dot(a32, x21, input_precision=EXACT)
    x31 = -tl.dot(x33, total, input_precision=EXACT)
    total = tl.dot(tl.load(row_3), x00, input_precision=EXACT) + tl.dot(a31, x10, input_precision=EXACT)
    x30 = -tl.dot(x33, total + tl.dot(a32, x20, input_precision=EXACT), input_precision=EXACT)
    tl.store(place, x00)
    tl.store(row_1, x10)
    tl.store(row_1 + NEAR, x11)
    tl.store(row_2, x20)
    tl.store(row_2 + NEAR, x21)
    tl.store(row_2 + 2 * NEAR, x22)
    tl.store(row_3, x30)
    tl.store(row_3 + NEAR, x31)
    tl.store(row_3 + 2 * NEAR, x32)
    tl.store(row_3 + 3 * NEAR, x33)


@triton.jit
def system_kernel(
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
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The interactions of a tile's tokens: the unit lower triangular system whose solution is their changes of the
    state, and how much of each change they read. Grid [t, value heads]; float32 system and within [t, value heads,
    TILE, TILE]."""
    head, run = tl.program_id(1), tl.load(tiles + tl.program_id(0) * 3)
    if run < 0:
        return
    end = tl.load(runs + run * 5 + 1)
    row = tl.load(tiles + tl.program_id(0) * 3 + 1) + tl.arange(0, TILE)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + KEY_HEADS * GROUP * VALUE_DIM
    total, beta = _gates(a, b, a_log, dt_bias, row, end, head, a_row, b_row)
    query_squares, key_squares = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    reads, writes = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    for part in tl.static_range(0, KEYS, PART):
        query = _heads(mixed, row, end, head // GROUP * KEY_DIM + part, channels, KEY_DIM - part, PART)
        key = _heads(mixed, row, end, (KEY_HEADS + head // GROUP) * KEY_DIM + part, channels, KEY_DIM - part, PART)
        query_squares += tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
        key_squares += tl.sum(key.to(tl.float32) * key.to(tl.float32), 1)
        reads += tl.dot(query, tl.trans(key), input_precision=PRECISION)
        writes += tl.dot(key, tl.trans(key), input_precision=PRECISION)
    query_factor, key_factor = scale * tl.rsqrt(query_squares + 1e-6), tl.rsqrt(key_squares + 1e-6)
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    decay = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], float("-inf"))) * key_factor[None, :]
    place = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * (TILE * TILE) + i * TILE + j
    tl.store(within + place, reads * decay * query_factor[:, None])
    tl.store(system + place, writes * decay * (beta * key_factor)[:, None])


@triton.jit
def scan_kernel(
    out,
    inverse,
    within,
    mixed,
    a,
    b,
    runs,
    tiles,
    recurrent,
    a_log,
    dt_bias,
    a_row,
    b_row,
    scale,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes a run's tiles in order through PART columns of a value head's state, which stays on the multiprocessor.
    Grid [r, value heads, VALUE_DIM / PART]; out [n, values] is the output before norm and gate."""
    run, head = runs + tl.program_id(0) * 5, tl.program_id(1)
    begin, end, slot = tl.load(run), tl.load(run + 1), tl.load(run + 2).to(tl.int64)
    fresh, tile = tl.load(run + 3), tl.load(run + 4)
    if slot < 0:
        return
    heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
    k, v = tl.arange(0, KEYS), tl.program_id(2) * PART + tl.arange(0, PART)
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    real = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    within_slot = head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    states = recurrent + slot * (heads * KEY_DIM * VALUE_DIM) + within_slot
    state = tl.load(states, real & (fresh == 0), 0.0)
    for first in range(begin, end, TILE):
        row = first + tl.arange(0, TILE)
        inside = (row < end)[:, None] & (v < VALUE_DIM)[None, :]
        total, beta = _gates(a, b, a_log, dt_bias, row, end, head, a_row, b_row)
        last = tl.min(total, 0)  # g is never above 0
        grown, left = tl.exp(total)[:, None], tl.exp(last - total)[:, None]
        query = _heads(mixed, row, end, head // GROUP * KEY_DIM, channels, KEY_DIM, KEYS)
        key = _heads(mixed, row, end, (KEY_HEADS + head // GROUP) * KEY_DIM, channels, KEY_DIM, KEYS)
        query = (_unit(query.to(tl.float32), 1) * scale).to(mixed.dtype.element_ty)
        key = _unit(key.to(tl.float32), 1).to(mixed.dtype.element_ty)
        value_place = row.to(tl.int64)[:, None] * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v[None, :]
        value = tl.load(mixed + value_place, inside, 0.0).to(tl.float32)
        known = state.to(mixed.dtype.element_ty)
        wanted = (value - grown * tl.dot(key, known, input_precision=PRECISION)) * beta[:, None]
        place = (tile.to(tl.int64) * heads + head) * (TILE * TILE) + i * TILE + j
        change = tl.dot(tl.load(inverse + place), wanted, input_precision=PRECISION)
        read = grown * tl.dot(query, known, input_precision=PRECISION)
        read += tl.dot(tl.load(within + place), change, input_precision=PRECISION)
        out_place = (row.to(tl.int64)[:, None] * heads + head) * VALUE_DIM + v[None, :]
        tl.store(out + out_place, read.to(out.dtype.element_ty), inside)
        written = (left * change).to(mixed.dtype.element_ty)
        state = tl.exp(last) * state + tl.dot(tl.trans(key), written, input_precision=PRECISION)
        copy = tl.load(tiles + tile * 3 + 2).to(tl.int64)
        copied = recurrent + copy * (heads * KEY_DIM * VALUE_DIM) + within_slot
        tl.store(copied, state, real & (copy >= 0))
        tile += 1
    tl.store(states, state, real)


@triton.jit
def norm_gate_kernel(
    out, z, runs, tiles, gain, z_row, heads, eps, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr
):
    """gain · x / rms(x) · SiLU(z) of a tile's tokens, in place. Grid [t, heads]."""
    head, run = tl.program_id(1), tl.load(tiles + tl.program_id(0) * 3)
    if run < 0:
        return
    end = tl.load(runs + run * 5 + 1)
    row = tl.load(tiles + tl.program_id(0) * 3 + 1).to(tl.int64) + tl.arange(0, TILE)
    v = tl.arange(0, VALUES)
    inside = (row < end)[:, None] & (v < VALUE_DIM)[None, :]
    place = out + (row[:, None] * heads + head) * VALUE_DIM + v[None, :]
    own = tl.load(place, inside, 0.0).to(tl.float32)
    normal = _rounded(own * tl.rsqrt(tl.sum(own * own, 1) / VALUE_DIM + eps)[:, None], out)
    normal = _rounded(normal * tl.load(gain + v, v < VALUE_DIM, 0.0).to(tl.float32)[None, :], out)
    gate = tl.load(z + row[:, None] * z_row + (head * VALUE_DIM + v)[None, :], inside, 0.0).to(tl.float32)
    tl.store(place, (normal * _silu(gate)).to(out.dtype.element_ty), inside)
