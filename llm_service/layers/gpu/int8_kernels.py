"""Products of rows that are rounded to 8 bits, each with a scale of its own, with weights of 8 bits, in Triton. Sums
are whole numbers, so they are exact: a row's do not depend on its company, nor on how they are cut."""

from __future__ import annotations

import triton
import triton.language as tl

from llm_service.layers.gpu.quantized_kernel import rows_of
from llm_service.layers.linear import quantized_weight

_STEPS = tl.constexpr(quantized_weight.STEPS)
_NO_FRACTIONS = tl.constexpr(12582912.0)
"""1.5 · 2²³, near which a float32 has no digits behind the point: what it is added to is rounded, halves to even."""


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
    """Grid [rows]. Rounds x [m, k] to int8 numbers [m, k], with scales float32 [m], none where one of a row is not a
    finite number. All are contiguous. With STEPS a row's scale is its expert's of `steps` float32 [EXPERTS], of which
    the rows end as in `int8_product_kernel`, those behind all being left out; else its own."""
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
    """float32 of sums int32, multiplied with both scales, and with a bias: rounded twice, in every form alike."""
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
    codes int8 [experts, n, k] with scales float32 [experts, n], bias [n], of one expert alone, if there is a BIAS.

    Up to BESIDE tiles of rows are multiplied with the same weights one after the other: a GPU's cache holds these. out
    is [m, n], or, of several SPLITS of the inputs, their sums int32 [SPLITS, m, n]. Of EXPERTS (at most POWER, a power
    of 2) the rows of each end before row `ends` [EXPERTS]; there are as many tiles as there may be. With 0 all rows are
    of the one weight that there is.
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
    """Grid [n / BLOCK, m]: what `int8_product_kernel` writes of one split, from the sums of several."""
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
