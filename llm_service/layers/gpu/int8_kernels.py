"""Products of rows in int8, each row with its own scale, and weights in int8, in Triton. Sums are integers and so
exact: a row's result depends neither on the batch nor on how the inputs are split."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.quantized_kernel import rows_of
from llm_service.layers.linear import quantized_weight

_STEPS = tl.constexpr(quantized_weight.STEPS)
_NO_FRACTIONS = tl.constexpr(12582912.0)
"""1.5 · 2²³. A float32 of this size has no fraction bits, so adding it rounds a number to an integer, halves to
even."""


@triton.jit
def round_rows_kernel(
    numbers,
    scales,
    x,
    steps,
    ends,
    k,
    STEPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds the rows of x [m, k] to int8 `numbers` [m, k] with float32 `scales` [m], which are NaN for a row with a
    number that is not finite. Grid [rows]; all tensors are contiguous. With STEPS a row's scale is that of its expert
    in `steps` float32 [EXPERTS], whose rows end as in `int8_product_kernel`, and rows behind all experts are skipped;
    otherwise each row gets its own."""
    row = tl.program_id(0).to(tl.int64)
    if EXPERTS:
        last = tl.load(ends + EXPERTS - 1)
        if row >= last:
            return
    each = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, k, BLOCK):
        size = tl.abs(tl.load(x + row * k + start + each, start + each < k, 0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, float("inf")))
    most = tl.max(largest, 0)
    if STEPS:
        expert = 0
        if EXPERTS:
            each_end = tl.arange(0, POWER)
            end = tl.load(ends + each_end, each_end < EXPERTS, 0)
            expert = tl.sum(((end <= row) & (each_end < EXPERTS)).to(tl.int32), 0)
        scale = tl.load(steps + expert)
    else:
        scale = tl.where(most > 0, tl.math.div_rn(most, _STEPS), 1.0)
    tl.store(scales + row, tl.where(most < float("inf"), scale, float("nan")))
    divisor = tl.where((scale > 0) & (most < float("inf")), scale, 1.0)  # with others all is 0, or no number, anyway
    for start in range(0, k, BLOCK):
        there = start + each < k
        given = tl.load(x + row * k + start + each, there, 0.0).to(tl.float32)
        found = tl.math.div_rn(tl.where(given == given, given, 0.0), divisor)
        found = tl.minimum(tl.maximum(found, -128.0), 127.0)
        tl.store(numbers + row * k + start + each, (found + _NO_FRACTIONS - _NO_FRACTIONS).to(tl.int8), there)


@triton.jit
def _scaled(sums, of_outputs, of_rows, bias):
    """float32: int32 sums times both scales, plus the bias. Rounded twice, in the same order in every kernel."""
    return tl.fma(sums.to(tl.float32), of_outputs * of_rows, bias)


@triton.jit(do_not_specialize=["m", "row_tiles"])
def int8_product_kernel(
    out,
    x,
    x_scales,
    codes,
    scales,
    bias,
    ends,
    m,
    n,
    k,
    row_tiles,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Grid [n / OUTPUTS · tiles of rows, SPLITS]; all tensors are contiguous: x int8 [m, k] with scales float32 [m],
    codes int8 [experts, n, k] with scales float32 [experts, n]; with BIAS, bias [n], for one expert only.

    Up to BESIDE tiles of rows are multiplied with the same weights one after the other, so the weights stay in the
    GPU's cache. out is [m, n], or with several SPLITS of the inputs their int32 sums [SPLITS, m, n]. The rows of each
    of EXPERTS (at most POWER, a power of 2) end before row `ends` [EXPERTS]; the number of tiles is the most that there
    may be. With EXPERTS 0 all rows use the only weight.
    """
    columns = tl.cdiv(n, OUTPUTS)
    begin = tl.program_id(0) // (BESIDE * columns) * BESIDE
    beside = min(row_tiles - begin, BESIDE)
    within = tl.program_id(0) % (BESIDE * columns)
    tile = begin + within % beside
    outputs = within // beside * OUTPUTS + tl.arange(0, OUTPUTS)
    expert = 0
    first, last = tile * ROWS, m
    if EXPERTS:
        expert, first, last = rows_of(tile, ends, EXPERTS, POWER, ROWS)
        if expert >= EXPERTS:
            return
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    there, real = rows < last, outputs < n
    weights = codes + tl.cast(expert, tl.int64) * n * k + outputs.to(tl.int64)[:, None] * k
    sums = tl.zeros([OUTPUTS, ROWS], tl.int32)
    stretch = tl.cdiv(tl.cdiv(k, INPUTS), SPLITS) * INPUTS
    begin_at = tl.program_id(1) * stretch
    for start in range(begin_at, min(k, begin_at + stretch), INPUTS):
        place = start + tl.arange(0, INPUTS)
        a = tl.load(x + rows[None, :] * k + place[:, None], there[None, :] & (place < k)[:, None], 0)
        w = tl.load(weights + place[None, :], real[:, None] & (place < k)[None, :], 0)
        sums = tl.dot(w, a, sums, out_dtype=tl.int32)
    inside = there[None, :] & real[:, None]
    if SPLITS > 1:
        at = (tl.program_id(1).to(tl.int64) * m + rows[None, :]) * n + outputs[:, None]
        tl.store(out + at, sums, inside)
    else:
        of_outputs = tl.load(scales + expert * n + outputs, real, 0.0)[:, None]
        of_rows = tl.load(x_scales + rows, there, 0.0)[None, :]
        added = tl.load(bias + outputs, real, 0.0).to(tl.float32) if BIAS else tl.zeros([OUTPUTS], tl.float32)
        found = _scaled(sums, of_outputs, of_rows, added[:, None])
        tl.store(out + rows[None, :] * n + outputs[:, None], found.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["m"])
def int8_join_kernel(
    out, sums, x_scales, scales, bias, m, n, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Joins the sums of several splits into the result that `int8_product_kernel` writes for one split. Grid [n /
    BLOCK, m]."""
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = outputs < n
    total = tl.zeros([BLOCK], tl.int32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * tl.cast(m, tl.int64) + row) * n + outputs, real, 0)
    of_outputs = tl.load(scales + outputs, real, 0.0)
    added = tl.load(bias + outputs, real, 0.0).to(tl.float32) if BIAS else tl.zeros([BLOCK], tl.float32)
    found = _scaled(total, of_outputs, tl.load(x_scales + row), added)
    tl.store(out + row * n + outputs, found.to(out.dtype.element_ty), real)
