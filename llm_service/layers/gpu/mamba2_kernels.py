"""Mamba-2 in Triton: three kernels besides the convolution's, for decoding and for runs of tokens.

`steps`, `runs` and `tiles` are as in `gdn_kernels`; `answers` int32 [n] is 1 for tokens of answers. Rows of `z` and
`dt` are `*_row` elements apart; `mixed` (the convolved rows), `read` float32 and `out` are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.gdn_kernels import _heads, _silu
from llm_service.layers.gpu.row_kernels import _rounded


@triton.jit
def _step_of(dt, answers, dt_bias, least):
    """Δ: in prompts no less than the least."""
    x = dt + dt_bias
    delta = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.where(answers != 0, delta, tl.maximum(delta, least))


@triton.jit
def mamba2_step_kernel(
    read,
    mixed,
    dt,
    steps,
    answers,
    recurrent,
    a_log,
    dt_bias,
    d,
    dt_row,
    least,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    HEAD: tl.constexpr,
):
    """One token of a head: its state is read, changed and written. Grid [s, heads]; STATE and HEAD are sizes, filled up
    to powers of two."""
    row = tl.load(steps + tl.program_id(0) * 3).to(tl.int64)
    slot = tl.load(steps + tl.program_id(0) * 3 + 1).to(tl.int64)
    fresh = tl.load(steps + tl.program_id(0) * 3 + 2)
    if slot < 0:
        return
    head = tl.program_id(1)
    heads: tl.constexpr = GROUPS * GROUP
    n, p = tl.arange(0, STATE), tl.arange(0, HEAD)
    real_n, real_p = n < STATE_DIM, p < HEAD_DIM
    token = mixed + row * (heads * HEAD_DIM + 2 * GROUPS * STATE_DIM)
    x = tl.load(token + head * HEAD_DIM + p, real_p, 0.0).to(tl.float32)
    shared = token + heads * HEAD_DIM + head // GROUP * STATE_DIM
    key = tl.load(shared + n, real_n, 0.0).to(tl.float32)
    query = tl.load(shared + GROUPS * STATE_DIM + n, real_n, 0.0).to(tl.float32)
    delta = _step_of(
        tl.load(dt + row * dt_row + head).to(tl.float32),
        tl.load(answers + row),
        tl.load(dt_bias + head).to(tl.float32),
        least,
    )
    decay = -tl.exp(tl.load(a_log + head).to(tl.float32)) * delta
    place = (slot * heads + head) * (STATE_DIM * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
    real = real_n[:, None] & real_p[None, :]
    state = tl.load(recurrent + place, real & (fresh == 0), 0.0) * tl.exp(decay)
    state += key[:, None] * (delta * x)[None, :]
    tl.store(recurrent + place, state, real)
    result = tl.sum(state * query[:, None], 0) + tl.load(d + head).to(tl.float32) * x
    tl.store(read + (row * heads + head) * HEAD_DIM + p, result, real_p)


@triton.jit
def mamba2_scan_kernel(
    read,
    mixed,
    dt,
    runs,
    tiles,
    answers,
    recurrent,
    a_log,
    dt_bias,
    d,
    dt_row,
    least,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes a run's tiles in order through PART columns of a head's state, which stays on the multiprocessor. Grid [r,
    heads, HEAD_DIM / PART]."""
    run, head = runs + tl.program_id(0) * 5, tl.program_id(1)
    begin, end, slot = tl.load(run), tl.load(run + 1), tl.load(run + 2).to(tl.int64)
    fresh, tile = tl.load(run + 3), tl.load(run + 4)
    if slot < 0:
        return
    heads: tl.constexpr = GROUPS * GROUP
    channels: tl.constexpr = heads * HEAD_DIM + 2 * GROUPS * STATE_DIM
    n, p = tl.arange(0, STATE), tl.program_id(2) * PART + tl.arange(0, PART)
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    real = (n < STATE_DIM)[:, None] & (p < HEAD_DIM)[None, :]
    within_slot = head * (STATE_DIM * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
    states = recurrent + slot * (heads * STATE_DIM * HEAD_DIM) + within_slot
    state = tl.load(states, real & (fresh == 0), 0.0)
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    skip = tl.load(d + head).to(tl.float32)
    for first in range(begin, end, TILE):
        row = first + tl.arange(0, TILE)
        known, place = row < end, row.to(tl.int64)
        delta = _step_of(
            tl.load(dt + place * dt_row + head, known, 0.0).to(tl.float32),
            tl.load(answers + place, known, 0),
            bias,
            least,
        )
        delta = tl.where(known, delta, 0.0)  # no decay or write behind the run's end
        total = tl.cumsum(rate * delta, 0)
        last = tl.min(total, 0)
        key = _heads(mixed, row, end, heads * HEAD_DIM + head // GROUP * STATE_DIM, channels, STATE_DIM, STATE)
        query_at = heads * HEAD_DIM + (GROUPS + head // GROUP) * STATE_DIM
        query = _heads(mixed, row, end, query_at, channels, STATE_DIM, STATE)
        inside = known[:, None] & (p < HEAD_DIM)[None, :]
        x = tl.load(mixed + place[:, None] * channels + (head * HEAD_DIM + p)[None, :], inside, 0.0).to(tl.float32)
        values = x * delta[:, None]
        decay = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))
        within = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay
        result = tl.dot(within, values, input_precision=PRECISION)
        result += tl.exp(total)[:, None] * tl.dot(query.to(tl.float32), state, input_precision=PRECISION)
        result += skip * x
        tl.store(read + (place[:, None] * heads + head) * HEAD_DIM + p[None, :], result, inside)
        written = tl.exp(last - total)[:, None] * values
        state = tl.exp(last) * state + tl.dot(tl.trans(key).to(tl.float32), written, input_precision=PRECISION)
        copy = tl.load(tiles + tile * 3 + 2).to(tl.int64)
        copied = recurrent + copy * (heads * STATE_DIM * HEAD_DIM) + within_slot
        tl.store(copied, state, real & (copy >= 0))
        tile += 1
    tl.store(states, state, real)


@triton.jit
def group_norm_kernel(out, read, z, gain, z_row, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """gain · u / rms(u) with u = read · SiLU(z), group by group, of every row. Grid [n, groups]; BLOCK is the size of a
    group, filled up to a power of two."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    own = tl.arange(0, BLOCK)
    real = own < SIZE
    place = row * (GROUPS * SIZE) + first + own
    gate = tl.load(z + row * z_row + first + own, real, 0.0).to(tl.float32)
    opened = tl.load(read + place, real, 0.0) * _silu(gate)
    normal = _rounded(opened * tl.rsqrt(tl.sum(opened * opened, 0) / SIZE + eps), out)
    result = normal * tl.load(gain + first + own, real, 0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), real)
