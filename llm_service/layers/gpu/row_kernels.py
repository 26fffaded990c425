"""What a decoder does to its rows between two products, in Triton, one kernel each: a GPU ends a step of few tokens
faster than it can begin its kernels, so their number counts. What torch's operators would round in between is rounded
here as well, so that it makes no difference which of them compute."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.telemetry import log
from llm_service.layers.ops import Pair

_log = log.get("kernels")

_HEADS, _GATES = 8, 1024
"""What one program takes: heads of a token; places of a row."""


@triton.jit
def _rounded(x, like):
    """float32, with no more digits than a pointer's elements have."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _normal(x, like, gain):
    """float32, rounded where a gain has no more digits than a pointer's elements: see `RowOps.rms_norm`."""
    return x if gain.dtype.element_ty == tl.float32 else _rounded(x, like)


@triton.jit
def norm_kernel(out, x, more, total, gain, row, more_row, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """A row over the root of its mean square, times `gain`; where ADD says so, of the sum of rows of x and more, which
    goes to total. Grid [rows]; those of x are `row` apart, those of more `more_row`; out and total are whole."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    own = tl.load(x + token * row + place, inside, 0.0).to(tl.float32)
    if ADD:
        own = _rounded(own + tl.load(more + token * more_row + place, inside, 0.0).to(tl.float32), x)
        tl.store(total + token * size + place, own.to(total.dtype.element_ty), inside)
    normal = _normal(own * tl.rsqrt(tl.sum(own * own, 0) / size + eps), x, gain)
    result = normal * tl.load(gain + place, inside, 0.0).to(tl.float32)
    tl.store(out + token * size + place, result.to(out.dtype.element_ty), inside)


@triton.jit
def qk_norm_rotary_kernel(
    out,
    x,
    cosine,
    sine,
    query_gain,
    key_gain,
    row,
    queries,
    heads,
    eps,
    NORM: tl.constexpr,
    HEAD: tl.constexpr,
    ROTARY: tl.constexpr,
    DIMS: tl.constexpr,
    PART: tl.constexpr,
):
    """Norms heads, where NORM says so, and turns the first ROTARY numbers of each by their token's angles. Grid
    [tokens, heads / PART].

    Tokens of x are `row` apart, their heads lie together, the first `queries` of them queries, the rest keys; out
    [tokens, heads, HEAD], cosine and sine [tokens, ROTARY].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PART + tl.arange(0, PART)
    dim = tl.arange(0, DIMS)
    rotates = dim < ROTARY
    pair = tl.where(rotates, (dim + ROTARY // 2) % ROTARY, dim)  # the other one of a pair that is rotated together
    real = dim < HEAD
    inside = (head < heads)[:, None] & real[None, :]
    base = x + token * row + head[:, None] * HEAD
    own = tl.load(base + dim[None, :], inside, 0.0).to(tl.float32)
    other = tl.load(base + pair[None, :], inside, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD + eps)[:, None]
        query = (head < queries)[:, None]
        gain = tl.where(query, query_gain, key_gain)
        gains = tl.load(gain + dim[None, :], inside, 0.0).to(tl.float32)
        paired = tl.load(gain + pair[None, :], inside, 0.0).to(tl.float32)
        own = _rounded(_normal(own * scale, x, query_gain) * gains, x)
        other = _rounded(_normal(other * scale, x, query_gain) * paired, x)
    rotated = tl.where((dim < ROTARY // 2)[None, :], -other, other)
    cos = tl.load(cosine + token * ROTARY + dim, rotates, 1.0).to(tl.float32)[None, :]
    sin = tl.load(sine + token * ROTARY + dim, rotates, 0.0).to(tl.float32)[None, :]
    result = _rounded(own * cos, x) + _rounded(rotated * sin, x)
    place = (token * heads + head[:, None]) * HEAD + dim[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), inside)


@triton.jit
def gate_kernel(out, x, ends, inner, GELU: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr):
    """silu(first half) · second half of each row, or gelu's by its hyperbolic tangent: x · logistic(√(8 / π) · (x +
    0.044715 · x³)). Grid [rows, inner / BLOCK]; x [rows, 2 · inner] is contiguous. Of `ends` int32 [ENDS], if there are
    any, the last is that of the rows that count."""
    token = tl.program_id(0).to(tl.int64)
    if ENDS:
        last = tl.load(ends + ENDS - 1)
        if token >= last:
            return
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < inner
    gate = tl.load(x + token * 2 * inner + place, inside, 0.0).to(tl.float32)
    up = tl.load(x + token * 2 * inner + inner + place, inside, 0.0).to(tl.float32)
    steep = gate
    if GELU:
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        steep = tl.maximum(steep, -80.0)  # below, float32 has no number for its exponential
    result = _rounded(gate * tl.sigmoid(steep), x) * up
    tl.store(out + token * inner + place, result.to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """See `RowOps`."""
    return _norm(x, x, None, gain, eps)


def add_rms_norm(x: Tensor, more: Tensor, gain: Tensor, eps: float) -> Pair:
    """See `RowOps`."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _norm(x, more, total, gain, eps)


def _norm(x: Tensor, more: Tensor, total: Tensor | None, gain: Tensor, eps: float) -> Tensor:
    """What `norm_kernel` gives; `more` is not touched where there is no `total` that it would be added for."""
    n, size = x.shape
    x, more = whole_rows(x), whole_rows(more)
    out = torch.empty((n, size), dtype=x.dtype, device=x.device)
    norm_kernel[(n,)](
        out,
        x,
        more,
        out if total is None else total,
        gain.contiguous(),
        x.stride(0),
        more.stride(0),
        size,
        eps,
        ADD=total is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return out


def qk_norm_rotary(
    x: Tensor, rotary: tuple[Tensor, ...], queries: int, keys: int, gains: Pair | None, eps: float
) -> Tensor:
    """See `RowOps`."""
    n, heads, head_dim = x.shape[0], queries + keys, x.shape[2]
    out = torch.empty((n, heads, head_dim), dtype=x.dtype, device=x.device)
    x, (cosine, sine) = whole_rows(x), (table.contiguous() for table in rotary)
    query_gain, key_gain = (gain.contiguous() for gain in gains or (cosine, sine))  # not read where nothing is normed
    qk_norm_rotary_kernel[(n, triton.cdiv(heads, _HEADS))](
        out,
        x,
        cosine,
        sine,
        query_gain,
        key_gain,
        x.stride(0),
        queries,
        heads,
        eps,
        NORM=gains is not None,
        HEAD=head_dim,
        ROTARY=cosine.shape[-1],
        DIMS=triton.next_power_of_2(head_dim),
        PART=_HEADS,
        num_warps=4,
    )
    return out


def whole_rows(x: Tensor) -> Tensor:
    """x [n, …] whose rows may be apart, as kernels are told, and have nothing between their numbers."""
    return x if x.is_contiguous() or x[:1].is_contiguous() else x.contiguous()


def silu_and_mul(x: Tensor, ends: Tensor | None = None) -> Tensor:
    """See `RowOps`."""
    return _act_and_mul(x, ends, gelu=False)


def gelu_and_mul(x: Tensor, ends: Tensor | None = None) -> Tensor:
    """See `RowOps`."""
    return _act_and_mul(x, ends, gelu=True)


def _act_and_mul(x: Tensor, ends: Tensor | None, *, gelu: bool) -> Tensor:
    n, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((n, inner), dtype=x.dtype, device=x.device)
    gate_kernel[(n, triton.cdiv(inner, _GATES))](
        *(out, x.contiguous(), out if ends is None else ends, inner),
        GELU=gelu,
        BLOCK=_GATES,
        ENDS=0 if ends is None else len(ends),
        num_warps=4,
    )
    return out


@functools.cache
def run_on(device: torch.device) -> bool:
    """Whether these run there: Triton comes with torch, and may still lack a C compiler, or a folder to write to."""
    try:
        rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
    except Exception as error:  # noqa: BLE001 - whatever it fails with, torch computes the same
        _log.warning("our kernels do not run on this device", cause=str(error)[:500])
        return False
    return True
