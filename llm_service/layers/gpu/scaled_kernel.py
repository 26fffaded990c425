"""Rounding of rows to e4m3, and products of experts with 8 bits on both sides, in Triton: torch has no such grouped
product with scales of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.quantized_kernel import rows_of

_HIGHEST = tl.constexpr(448.0)
"""Of e4m3."""
_LEAST_NORMAL = tl.constexpr(2.0**-6)
"""Of e4m3; smaller ones are as far apart as these."""
_NO_FOURTH = tl.constexpr(1.5 * 2.0**20)
"""Times the number's power of two, this rounds a float32 to three bits behind the first when added to it."""
_SMALLEST = tl.constexpr(2.0**-126 * 448.0)
"""Smaller maxima are rounded as if they were this: their scale would not be a normal number."""


@triton.jit
def _three_bits(x):
    """Rounds float32 to the digits of e4m3, halves to even, so that the conversion itself changes nothing: Triton's
    interpreter converts otherwise than a GPU."""
    power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    near = tl.maximum(power, _LEAST_NORMAL) * _NO_FOURTH
    return x + near - near


@triton.jit
def e4m3(x):
    """Finite numbers as e4m3; those that are too large become its largest."""
    return _three_bits(tl.minimum(tl.maximum(x.to(tl.float32), -_HIGHEST), _HIGHEST)).to(tl.float8e4nv)


@triton.jit
def _divided(x, largest):
    """Divides x float32 by a step such that _HIGHEST steps reach `largest`: returns e4m3 and the step, which is NaN
    where a number is not finite."""
    finite = largest < float("inf")
    scale = tl.math.div_rn(tl.maximum(tl.where(finite, largest, 0.0), _SMALLEST), _HIGHEST)
    numbers = tl.math.div_rn(tl.where(finite, x, 0.0), scale)
    return e4m3(numbers), tl.where(finite, scale, float("nan"))


@triton.jit
def _size(x):
    """The absolute value in float32; NaN counts as infinity."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit(do_not_specialize=["m", "row_stride", "group_stride"])
def round_to_e4m3_kernel(
    numbers,
    scales,
    x,
    ends,
    m,
    k,
    row_stride,
    group_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Rounds x [m, k] to e4m3 `numbers` [rows, k], with zeros behind row m; both are contiguous. Grid [rows]. With
    WIDTH, which divides k and BLOCK, each WIDTH numbers have a float32 scale, otherwise each row has one. In `scales`
    the scale of the next row is `row_stride` elements on, and that of the next group `group_stride`. The last of `ends`
    int32 [ENDS], if there are any, is the end of the rows that count."""
    row = tl.program_id(0).to(tl.int64)
    if ENDS:
        last = tl.load(ends + ENDS - 1)
        if row >= last:
            return
    each = tl.arange(0, BLOCK)
    if WIDTH:
        for start in range(0, k, BLOCK):
            there = (row < m) & (start + each < k)
            given = tl.load(x + row * k + start + each, there, 0.0).to(tl.float32)
            parts = tl.reshape(given, (BLOCK // WIDTH, WIDTH))
            found, scale = _divided(parts, tl.max(_size(parts), 1)[:, None])
            tl.store(numbers + row * k + start + each, tl.reshape(found, (BLOCK,)), start + each < k)
            group = start // WIDTH + tl.arange(0, BLOCK // WIDTH)
            at = row * row_stride + group.to(tl.int64) * group_stride
            tl.store(scales + at, tl.reshape(scale, (BLOCK // WIDTH,)), group < k // WIDTH)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, k, BLOCK):
            there = (row < m) & (start + each < k)
            largest = tl.maximum(largest, _size(tl.load(x + row * k + start + each, there, 0.0).to(tl.float32)))
        most = tl.max(largest, 0)
        for start in range(0, k, BLOCK):
            there = (row < m) & (start + each < k)
            found, scale = _divided(tl.load(x + row * k + start + each, there, 0.0).to(tl.float32), most)
            tl.store(numbers + row * k + start + each, found, start + each < k)
            tl.store(scales + row * row_stride, scale)


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
    """Grid [n / OUTPUTS, tiles of rows]; x e4m3 [m, k], out [m, n], codes [experts, n, k] (e4m3 as bytes) and float32
    scales are contiguous.

    Each INPUTS numbers of a row of x have a scale, x_scales [m, k / INPUTS], and so have each INPUTS of an output,
    scales [experts, k / INPUTS, n]; with ONE, each whole row and each whole output has one. The rows of each of EXPERTS
    (at most POWER, a power of 2) end before row `ends` [EXPERTS]; the number of tiles is the most that there may be.
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
