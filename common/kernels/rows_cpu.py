"""What a decoder does to its rows between two products, on a CPU in float32, compiled by numba, one kernel each.

torch needs five operators for a norm and ten for what is turned: to start them takes longer than the arithmetic of a
few rows. Few are computed by one thread, since they take microseconds, and to wake others takes as long.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.kernels import vectors_cpu
from common.kernels.jit import Typed, compiled, inner
from common.kernels.vectors_cpu import FLOAT, LANES, gate
from common.panels import Array, wide_vectors

FEW = 32
"""Rows up to which one thread is faster."""


@inner
def _norm_row(out: Any, x: Any, gain: Any, eps: Any) -> None:
    """float32 out, x and gain [size]."""
    size, total = x.shape[0], np.float32(0.0)
    for place in range(size):
        total += x[place] * x[place]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for place in range(size):
        out[place] = x[place] * factor * gain[place]


def _norm(out: Any, x: Any, gain: Any, eps: Any) -> None:
    """float32 out [n, size], x alike, of any strides; gain [size]."""
    for row in range(x.shape[0]):
        _norm_row(out[row], x[row], gain, eps)


def _norm_many(out: Any, x: Any, gain: Any, eps: Any) -> None:
    """As `_norm`, on all threads."""
    for row in numba.prange(x.shape[0]):
        _norm_row(out[row], x[row], gain, eps)


@inner
def _turn_row(out: Any, x: Any, cosine: Any, sine: Any, gains: Any, queries: Any, eps: Any) -> None:
    """float32 out [heads, dim], x [heads or more, dim], cosine and sine [dim], gains [2, dim]."""
    size = out.shape[1]
    half = size // 2
    for head in range(out.shape[0]):
        factor = np.float32(1.0)
        if eps >= 0:
            total = np.float32(0.0)
            for place in range(size):
                total += x[head, place] * x[head, place]
            factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        kind = 0 if head < queries else 1
        for place in range(half):
            first = x[head, place] * factor * gains[kind, place]
            second = x[head, half + place] * factor * gains[kind, half + place]
            out[head, place] = first * cosine[place] - second * sine[place]
            out[head, half + place] = second * cosine[half + place] + first * sine[half + place]


def _turn(out: Any, x: Any, cosine: Any, sine: Any, gains: Any, queries: Any, eps: Any) -> None:
    """float32 out [n, heads, dim], x [n, heads or more, dim], cosine and sine [n, 1, dim], gains [2, dim]. Where eps is
    below 0, without a norm."""
    for row in range(out.shape[0]):
        _turn_row(out[row], x[row], cosine[row, 0], sine[row, 0], gains, queries, eps)


def _turn_many(out: Any, x: Any, cosine: Any, sine: Any, gains: Any, queries: Any, eps: Any) -> None:
    """As `_turn`, on all threads."""
    for row in numba.prange(out.shape[0]):
        _turn_row(out[row], x[row], cosine[row, 0], sine[row, 0], gains, queries, eps)


@inner
def _gate_row(out: Any, x: Any) -> None:
    """float32 out [inner], x [2 · inner]."""
    inner = out.shape[0]
    whole = inner // LANES
    gate(out.ctypes.data, x.ctypes.data, x.ctypes.data + inner * FLOAT, whole)
    for place in range(whole * LANES, inner):
        out[place] = x[place] / (np.float32(1.0) + np.exp(-x[place])) * x[inner + place]


def _gate(out: Any, x: Any) -> None:
    """float32 out [n, inner], x [n, 2 · inner], both in order."""
    for row in range(out.shape[0]):
        _gate_row(out[row], x[row])


def _gate_many(out: Any, x: Any) -> None:
    """As `_gate`, on all threads."""
    for row in numba.prange(out.shape[0]):
        _gate_row(out[row], x[row])


_few_normed, _many_normed = compiled(_norm, parallel=False), compiled(_norm_many)
_few_turned, _many_turned = compiled(_turn, parallel=False), compiled(_turn_many)
_few_gated = compiled(_gate, parallel=False, made_of=vectors_cpu)
_many_gated = compiled(_gate_many, made_of=vectors_cpu)

_number, _rows, _heads = numba.float32, numba.float32[:, ::1], numba.float32[:, :, ::1]
_NORM = _rows, _rows, numba.float32[::1], _number
_TURN = _heads, _heads, _heads, _heads, _rows, numba.intp, _number
TYPED = {
    "few_normed": Typed(_few_normed, _NORM),
    "many_normed": Typed(_many_normed, _NORM),
    "few_turned": Typed(_few_turned, _TURN),
    "many_turned": Typed(_many_turned, _TURN),
    "few_gated": Typed(_few_gated, (_rows, _rows)),
    "many_gated": Typed(_many_gated, (_rows, _rows)),
}
"""Gates are for processors whose vectors are `vectors_cpu`'s."""


def normed_rows(x: Array, gain: Array, eps: float) -> Array:
    """`rms_norm` of arrays."""
    out = np.empty(x.shape, np.float32)
    (_few_normed if len(x) <= FEW else _many_normed)(out, x, gain, np.float32(eps))
    return out


def turned_heads(x: Array, cosine: Array, sine: Array, queries: int, keys: int, gains: Array, eps: float) -> Array:
    """`turned` of arrays; gains [2, head_dim], eps below 0 where nothing is normed."""
    out = np.empty((x.shape[0], queries + keys, x.shape[2]), np.float32)
    kernel = _few_turned if len(x) <= FEW else _many_turned
    kernel(out, x, cosine, sine, gains, queries, np.float32(eps))
    return out


def gated_rows(x: Array) -> Array:
    """`gated` of arrays, for processors whose vectors are `vectors_cpu`'s."""
    out = np.empty((x.shape[0], x.shape[1] // 2), np.float32)
    (_few_gated if len(x) <= FEW else _many_gated)(out, np.ascontiguousarray(x))
    return out


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x float32 [n, size], whose rows may be apart, over the root of each row's mean square, times gain [size]."""
    return torch.from_numpy(normed_rows(x.numpy(), gain.numpy(), eps))


def turned(
    x: Tensor, cosine: Tensor, sine: Tensor, queries: int, keys: int, gains: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """The first heads of x float32 [n, queries + keys or more, head_dim], by the angles of each token: [n, queries +
    keys, head_dim].

    cosine and sine are [n, 1, head_dim]. With `gains`, [head_dim] for queries and for keys, each head is first normed.
    """
    both, least = both_gains(gains, eps, x.shape[2])
    return torch.from_numpy(turned_heads(x.numpy(), cosine.numpy(), sine.numpy(), queries, keys, both, least))


def both_gains(gains: tuple[Tensor, Tensor] | None, eps: float, head_dim: int) -> tuple[Array, float]:
    """The last two arguments of `turned_heads`."""
    return (np.ones((2, head_dim), np.float32), -1.0) if gains is None else (torch.stack(gains).numpy(), eps)


def gated(x: Tensor) -> Tensor:
    """x [n, 2 · inner] → silu(first half) · second half, [n, inner]."""
    if wide_vectors():
        return torch.from_numpy(gated_rows(x.numpy()))
    first, second = x.chunk(2, dim=-1)
    return functional.silu(first).mul_(second)
