"""A product of few rows with an 8-bit weight, in Triton: weights are widened on their way into the tensor cores, so
that a step of decoding reads a byte for each of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _OUTPUTS, _INPUTS = 16, 64, 128
"""A program's part of the product."""


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    out,
    x,
    weight,
    scale,
    m,
    n,
    k,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid [n / OUTPUTS, m / ROWS]; x [m, k], weight [n, k] and out [m, n] are contiguous."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    base = outputs.to(tl.int64) * k
    for start in range(0, k, INPUTS):
        place = start + inputs
        a = tl.load(x + rows[:, None] * k + place[None, :], (rows[:, None] < m) & (place[None, :] < k), 0.0)
        w = tl.load(weight + base[None, :] + place[:, None], (outputs[None, :] < n) & (place[:, None] < k), 0)
        total += tl.dot(a, w.to(a.dtype), input_precision=PRECISION)
    factor = tl.load(scale + outputs, outputs < n, 0.0)
    result = (total * factor[None, :]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * n + outputs[None, :], result, (rows[:, None] < m) & (outputs[None, :] < n))


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [m, k] of any floating type, int8 weight [n, k], scale float32 [n] → [m, n] in the type of x."""
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    _product_kernel[(triton.cdiv(n, _OUTPUTS), triton.cdiv(m, _ROWS))](
        out,
        x.contiguous(),
        weight,
        scale,
        m,
        n,
        k,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
    )
    return out
