"""Row-wise operations of a vision transformer between two products, in bfloat16, compiled by numba for processors with
AVX512-BF16, one kernel each. Arithmetic is float32; results are rounded as torch rounds them. A row's result does not
depend on the batch."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Array, Typed, compiled
from common.cpu.vectors.powers import GELU_BEND, GELU_SLOPE
from common.cpu.vectors.shorts import add_row, gelu_row, norm_row, rms_norm_row, rotate


def _turn(x: Any, cosine: Any, sine: Any) -> None:
    """int16 x [n, heads, dim], in place; cosine and sine float32 [n, 1, angles], of half a head or of a whole one."""
    half = x.shape[2] // 2
    later = cosine.shape[2] - half
    for row in numba.prange(x.shape[0]):
        tables = (
            *(cosine[row, 0].ctypes.data, sine[row, 0].ctypes.data),
            *(cosine[row, 0, later:].ctypes.data, sine[row, 0, later:].ctypes.data),
        )
        first = x[row].ctypes.data
        for head in range(x.shape[1]):
            place = first + head * x.strides[1]
            rotate(place, place, tables, half)


def _norm(total: Any, out: Any, x: Any, more: Any, weight: Any, bias: Any, eps: Any) -> None:
    """int16 total, out, x and more [n, width], weight and bias [width]. If more is [0, width], x alone is normed and
    total is x. With a bias this is a layer norm; without one ([0]), an RMS norm."""
    for row in numba.prange(x.shape[0]):
        here, to = total[row].ctypes.data, out[row].ctypes.data
        if len(more):
            add_row(here, x[row].ctypes.data, more[row].ctypes.data, x.shape[1])
        if len(bias):
            norm_row(to, here, (weight.ctypes.data, bias.ctypes.data), x.shape[1], eps)
        else:
            rms_norm_row(to, here, weight.ctypes.data, x.shape[1], eps)


def _gelu(x: Any, slope: Any, bend: Any) -> None:
    """int16 x [n, width], in place."""
    for row in numba.prange(x.shape[0]):
        gelu_row(x[row].ctypes.data, x.shape[1], slope, bend)


_turn_kernel, _norm_kernel, _gelu_kernel = (compiled(each, made_of=[vectors]) for each in (_turn, _norm, _gelu))
_heads, _table = numba.int16[:, :, :], numba.float32[:, :, ::1]
_rows, _vector = numba.int16[:, ::1], numba.int16[::1]
TYPED = {
    "turn": Typed(_turn_kernel, (_heads, _table, _table)),
    "norm": Typed(_norm_kernel, (*[_rows] * 4, _vector, _vector, numba.float32)),
    "gelu": Typed(_gelu_kernel, (_rows, numba.float32, numba.float32)),
}
KERNELS = tuple(f"{__name__}:{name}" for name in TYPED)
"""Their names, as `common.cpu.jit.find` takes them."""


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates bfloat16 x [n, heads, dim], the numbers of a head lie together, in place, the first half of a head
    against the second, and gives it back; cosine and sine float32 [n, 1, dim / 2], or [n, 1, dim], of both halves."""
    _turn_kernel(_shorts(x), cosine.contiguous().numpy(), sine.contiguous().numpy())
    return x


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The layer norm of bfloat16 x [n, width]; weight and bias bfloat16 [width]. Without a bias rows are divided by the
    root of their mean square."""
    x = x.contiguous()
    out, none = torch.empty_like(x), x.new_empty(0)
    _norm_kernel(
        *(_shorts(each) for each in (x, out, x, x[:0], weight, none if bias is None else bias)), np.float32(eps)
    )
    return out


def add_and_norm(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + more, and its norm."""
    total, out, none = torch.empty_like(x), torch.empty_like(x), x.new_empty(0)
    given = total, out, x.contiguous(), more.contiguous(), weight, none if bias is None else bias
    _norm_kernel(*(_shorts(each) for each in given), np.float32(eps))
    return total, out


def gelu(x: Tensor, slope: float = GELU_SLOPE, bend: float = GELU_BEND) -> Tensor:
    """x · logistic(slope · (x + bend · x³)) of contiguous bfloat16 x [n, width], in place; returns x. By default this
    is gelu's tanh approximation."""
    _gelu_kernel(_shorts(x), np.float32(slope), np.float32(bend))
    return x


def _shorts(x: Tensor) -> Array:
    """bfloat16 as int16 over the same memory."""
    shorts: Array = x.detach().view(torch.int16).numpy()
    return shorts
