"""What a vision transformer does to its rows between two products, in bfloat16, compiled by numba for processors with
AVX512-BF16, one kernel each. Arithmetic is float32; what leaves a kernel is rounded, as by torch. A row's numbers do
not depend on those beside it."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Array, Typed, compiled
from common.cpu.vectors.shorts import add_row, gelu_row, norm_row, rotate


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


def _add_layer_norm(total: Any, out: Any, x: Any, more: Any, weight: Any, bias: Any, eps: Any) -> None:
    """int16 total, out, x and more [n, width], weight and bias [width]."""
    parameters = weight.ctypes.data, bias.ctypes.data
    for row in numba.prange(x.shape[0]):
        here = total[row].ctypes.data
        add_row(here, x[row].ctypes.data, more[row].ctypes.data, x.shape[1])
        norm_row(out[row].ctypes.data, here, parameters, x.shape[1], eps)


def _gelu(x: Any) -> None:
    """int16 x [n, width], in place."""
    for row in numba.prange(x.shape[0]):
        gelu_row(x[row].ctypes.data, x.shape[1])


_turn_kernel, _add_layer_norm_kernel, _gelu_kernel = (
    compiled(each, made_of=[vectors]) for each in (_turn, _add_layer_norm, _gelu)
)
_heads, _table = numba.int16[:, :, :], numba.float32[:, :, ::1]
_rows, _vector = numba.int16[:, ::1], numba.int16[::1]
TYPED = {
    "turn": Typed(_turn_kernel, (_heads, _table, _table)),
    "add_layer_norm": Typed(_add_layer_norm_kernel, (*[_rows] * 4, _vector, _vector, numba.float32)),
    "gelu": Typed(_gelu_kernel, (_rows,)),
}
KERNELS = tuple(f"{__name__}:{name}" for name in TYPED)
"""Their names, as `common.cpu.jit.find` takes them."""


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates bfloat16 x [n, heads, dim], the numbers of a head lie together, in place, the first half of a head
    against the second, and gives it back; cosine and sine float32 [n, 1, dim / 2], or [n, 1, dim], of both halves."""
    _turn_kernel(_shorts(x), cosine.contiguous().numpy(), sine.contiguous().numpy())
    return x


def add_layer_norm(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + more, bfloat16 [n, width], and its layer norm; weight and bias bfloat16 [width]."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    given = (_shorts(each) for each in (total, out, x.contiguous(), more.contiguous(), weight, bias))
    _add_layer_norm_kernel(*given, np.float32(eps))
    return total, out


def gelu(x: Tensor) -> Tensor:
    """gelu by its hyperbolic tangent of bfloat16 x [n, width], which lies together, in place; gives it back."""
    _gelu_kernel(_shorts(x))
    return x


def _shorts(x: Tensor) -> Array:
    """bfloat16 as int16 over the same memory."""
    shorts: Array = x.detach().view(torch.int16).numpy()
    return shorts
