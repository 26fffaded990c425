"""A product of few rows with an 8-bit weight, compiled by numba: each weight is read once for each row, and that is all
that one row costs. torch's own operator for this takes bfloat16 and reads slower (docs/design/cpu-kernels.md)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from llm_service.layers.cpu.jit import Typed, compiled


def _product(out: Any, x: Any, weight: Any, scale: Any) -> None:
    """float32 out [m, n] and x [m, k], int8 weight [n, k], float32 scale [n]."""
    for output in numba.prange(weight.shape[0]):
        for row in range(x.shape[0]):
            total = np.float32(0.0)
            for place in range(x.shape[1]):
                total += x[row, place] * np.float32(weight[output, place])
            out[row, output] = total * scale[output]


_kernel = compiled(_product)
_matrix = numba.float32[:, ::1]
TYPED = {"product": Typed(_kernel, (_matrix, _matrix, numba.int8[:, ::1], numba.float32[::1]))}


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x float32 [m, k], int8 weight [n, k], scale float32 [n] → float32 [m, n]."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _kernel(out.numpy(), x.contiguous().numpy(), weight.numpy(), scale.numpy())
    return out
