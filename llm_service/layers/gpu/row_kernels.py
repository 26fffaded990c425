"""Row-wise operations of a decoder between two products, in Triton, one kernel each: for few tokens a GPU runs kernels
faster than they can be launched, so their number counts. Intermediate results are rounded where torch's operators would
round them, so either gives the same result."""

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
"""Tile sizes: heads of a token; elements of a row."""


@triton.jit
def _rounded(x, like):
    """float32, with no more digits than a pointer's elements have."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _normal(x, like, gain):
    """Normed rows in float32, times the gain; rounded first if the gain's dtype has no more digits than the pointer's:
    see `RowOps.rms_norm`."""
    return x if gain.dtype.element_ty == tl.float32 else _rounded(x, like)


@triton.jit
def norm_kernel(out, x, more, total, gain, row, more_row, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """RMS norm of a row, times `gain`. With ADD it norms the sum of the rows of x and `more`, which is stored in
    `total`. Grid [rows]; rows of x are `row` elements apart, those of `more` `more_row`; out and total are
    contiguous."""
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
    """Norms heads (if NORM) and rotates the first ROTARY elements of each by its token's angles. Grid [tokens, heads /
    PART].

    Tokens of x are `row` elements apart, with their heads adjacent: first `queries` queries, then keys. out [tokens,
    heads, HEAD], cosine and sine [tokens, ROTARY].
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
    """silu(first half) · second half of each row; with GELU the tanh approximation of gelu instead of silu: x ·
    logistic(√(8 / π) · (x + 0.044715 · x³)). Grid [rows, inner / BLOCK]; x [rows, 2 · inner] is contiguous. The last of
    `ends` int32 [ENDS], if there are any, is the end of the rows that count."""
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
    """The result of `norm_kernel`. Without `total`, `more` is not read."""
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
    query_gain, key_gain = (gain.contiguous() for gain in gains or (cosine, sine))  # not read without a norm
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
    """x [n, …] with contiguous rows. Rows may be apart from each other, because kernels are told their stride."""
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
    """Whether Triton's kernels run on a device. Triton comes with torch, but may lack a C compiler or a writable cache
    directory."""
    try:
        rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
    except Exception as error:  # noqa: BLE001 - whatever it fails with, torch computes the same
        _log.warning("our kernels do not run on this device", cause=str(error)[:500])
        return False
    return True
