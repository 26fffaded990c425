"""A token each of many sequences by Kimi Delta Attention, in Triton; convolutions are those of `gdn_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.gdn_kernels import _unit
from llm_service.layers.gpu.row_kernels import _rounded


@triton.jit
def _fading(a, rate, least, BOUNDED: tl.constexpr):
    """g: the logarithm of what is left of a state."""
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
    """One token of a head: its state is read, changed and written, and what is read normed and gated. Grid [s, heads];
    DIMS is a head's size, filled up to a power of two. `steps` are as in `gdn_kernels`; out and mixed are whole, and
    what is BOUNDED never fades by more than `least`."""
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
