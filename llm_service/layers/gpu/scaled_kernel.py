"""Products of experts in 8 bits on both sides, in Triton: the library has none whose scales are for blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.quantized_kernel import rows_of


@triton.jit
def scaled_product_kernel(
    out,
    x,
    x_scales,
    codes,
    scales,
    ends,
    n,
    k,
    ONE: tl.constexpr,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Grid [n / OUTPUTS, tiles of rows]; x e4m3 [m, k] and out [m, n] are contiguous, and so are codes [experts, n, k],
    e4m3 as bytes, and float32 scales.

    Each INPUTS numbers of a row of x have a scale, x_scales [m, k / INPUTS], and each INPUTS of an output's, scales
    [experts, k / INPUTS, n]; or, where ONE says so, all of a row and all of an output's. Of EXPERTS (at most POWER, a
    power of 2) the rows of each end before row `ends` [EXPERTS]; there are as many tiles as there may be.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    expert, first, last = rows_of(tl.program_id(1), ends, EXPERTS, POWER, ROWS)
    if expert >= EXPERTS:
        return
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    there, real = rows < last, outputs < n
    groups = 1 if ONE else tl.cdiv(k, INPUTS)
    weights = codes + tl.cast(expert, tl.int64) * n * k + outputs.to(tl.int64)[:, None] * k
    weight_scales = scales + tl.cast(expert, tl.int64) * groups * n + outputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for group in range(tl.cdiv(k, INPUTS)):
        place = group * INPUTS + tl.arange(0, INPUTS)
        a = tl.load(x + rows[None, :] * k + place[:, None], there[None, :] & (place < k)[:, None], 0.0)
        w = tl.load(weights + place[None, :], real[:, None] & (place < k)[None, :], 0)
        w = w.to(tl.float8e4nv, bitcast=True)
        if ONE:  # Hopper's tensor cores add in fewer bits than float32 has: after each group, their sum leaves them
            total = tl.dot(w, a, total, max_num_imprecise_acc=INPUTS)
        else:
            own = tl.load(weight_scales + group * n, real, 0.0)
            given = tl.load(x_scales + rows * groups + group, there, 0.0)
            total += tl.dot(w, a) * own[:, None] * given[None, :]
    if ONE:
        total *= tl.load(weight_scales, real, 0.0)[:, None] * tl.load(x_scales + rows, there, 0.0)[None, :]
    at = rows[None, :] * n + outputs[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), there[None, :] & real[:, None])
