"""Products with 8-bit or 4-bit weights, in Triton. Codes become 16-bit floats in registers before the tensor cores read
them, without loss; the sum of each group is multiplied with its scale in float32."""

from __future__ import annotations

import triton
import triton.language as tl

INT8, UINT8, E4M3, UINT4, E2M1, LEVELS = (tl.constexpr(each) for each in range(6))
"""Number formats. The last three have two numbers in a byte, the first in its lower half; LEVELS are indices of a
table."""


@triton.jit
def _numbers(codes, levels, FORM: tl.constexpr, TYPE: tl.constexpr):
    """uint8 codes [n, c] → TYPE [n, c], or [n, 2 · c] of two per byte; `levels` float32 [16] is the table of LEVELS. An
    e4m3 comes out times 2⁻⁸ and an e2m1 times 2⁻¹⁴, because a float16's exponent has another bias: so the conversion
    only moves bits."""
    if FORM == INT8:
        found = codes.to(tl.int8, bitcast=True).to(TYPE)
    elif FORM == UINT8:
        found = codes.to(TYPE)
    elif FORM == E4M3:
        wide = codes.to(tl.uint16)
        found = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(TYPE)
    else:
        both = tl.join(codes & 15, codes >> 4)
        each = both.reshape(codes.shape[0], 2 * codes.shape[1])
        if FORM == UINT4:
            found = each.to(TYPE)
        elif FORM == LEVELS:
            found = tl.load(levels + each.to(tl.int32)).to(TYPE)
        else:
            wide = each.to(tl.uint16)
            found = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(TYPE)
    return found


@triton.jit
def _constants(at, inside, E4M3_SCALES: tl.constexpr):
    """Scales in float32. Those of e4m3 are stored as bytes and come out times 2⁻⁸."""
    found = tl.load(at, inside, 0)
    return _numbers(found, at, E4M3, tl.float32) if E4M3_SCALES else found.to(tl.float32)


@triton.jit
def _tile(base, levels, n, k, outputs, start, FORM: tl.constexpr, INPUTS: tl.constexpr, TYPE: tl.constexpr):
    """TYPE [outputs, INPUTS]: a weight's numbers from input `start` on; `base` is where its codes begin."""
    EACH: tl.constexpr = 2 if FORM >= UINT4 else 1
    length = (k + EACH - 1) // EACH
    place = start // EACH + tl.arange(0, INPUTS // EACH)
    at = base + outputs.to(tl.int64)[:, None] * length + place[None, :]
    codes = tl.load(at, (outputs < n)[:, None] & (place < length)[None, :], 0)
    return _numbers(codes, levels, FORM, TYPE)


@triton.jit
def rows_of(tile, ends, EXPERTS: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of ROWS rows, its first row, and its end. The rows of each expert end before row `ends`
    [EXPERTS]; a tile behind all of them has no expert. POWER is a power of 2, at least EXPERTS."""
    each = tl.arange(0, POWER)
    end = tl.load(ends + each, each < EXPERTS, 0)
    begin = tl.load(ends + each - 1, (each > 0) & (each < EXPERTS), 0)
    tiles = tl.where(each < EXPERTS, (end - begin + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum(((upto <= tile) & (each < EXPERTS)).to(tl.int32), 0)
    own = each == expert
    first = tl.sum(tl.where(own, begin + (tile - upto + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@triton.jit(do_not_specialize=["m"])
def product_kernel(
    out,
    x,
    codes,
    levels,
    scales,
    zeros,
    units,
    groups,
    ends,
    m,
    n,
    k,
    group_count,
    before,
    FORM: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ONE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid [n / OUTPUTS, tiles of rows, SPLITS]; x [m, k] and out [SPLITS, m, n] are contiguous.

    Weights are those of `GpuWeight`, with `group_count` groups of inputs. If a tile of INPUTS lies in one group, groups
    have COLUMNS inputs each, of which the first lacks `before`; if COLUMNS is 0, int32 groups [k] gives the group of
    each input. ONE: there is one group. ZEROS: 0 for no zero points, 1 for one per output, 2 for one per output and
    group. The rows of each of EXPERTS (at most POWER, a power of 2) end before row `ends` [EXPERTS]; the number of
    tiles is the most that there may be. With EXPERTS 0 all rows use the only weight.
    """
    tile = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    TYPE: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = 2 if FORM >= UINT4 else 1
    # As `_numbers` has e2m1 and e4m3, they are too small for float16 once they are multiplied with scales.
    SHARE: tl.constexpr = 16384.0 if FORM == E2M1 else 256.0 if FORM == E4M3 else 1.0
    LARGER: tl.constexpr = 1.0 if COLUMNS else SHARE * 256.0 if FORM == E2M1 and E4M3_SCALES else SHARE
    expert, base = 0, codes
    first, last = tile * ROWS, m
    if EXPERTS:
        expert, first, last = rows_of(tile, ends, EXPERTS, POWER, ROWS)
        if expert >= EXPERTS:
            return
        base += tl.cast(expert, tl.int64) * n * ((k + HALF - 1) // HALF)
    rows = first + tl.arange(0, ROWS)
    zero_rows = group_count if ZEROS == 2 else ZEROS
    scale_base = scales + expert * group_count * n
    zero_base = zeros + expert * zero_rows * n
    real = outputs < n
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if ZEROS == 1:
        zero = tl.load(zero_base + outputs, real, 0).to(TYPE)
    stretch = tl.cdiv(tl.cdiv(k, INPUTS), SPLITS) * INPUTS
    begin_at = tl.program_id(2) * stretch
    for start in range(begin_at, min(k, begin_at + stretch), INPUTS):
        place = start + tl.arange(0, INPUTS)
        a = tl.load(
            x + rows.to(tl.int64)[None, :] * k + place[:, None], (rows < last)[None, :] & (place < k)[:, None], 0.0
        )
        w = _tile(base, levels, n, k, outputs, start, FORM, INPUTS, tl.float32 if FORM == LEVELS else TYPE)
        if COLUMNS:
            group = (start + before) // COLUMNS
            if ZEROS == 2:
                zero = tl.load(zero_base + group * n + outputs, real, 0).to(TYPE)
            if ZEROS:
                w = w - zero[:, None]
            if ONE:
                total = tl.dot(w.to(TYPE), a, total, input_precision=PRECISION)
            else:
                scale = _constants(scale_base + group * n + outputs, real, E4M3_SCALES)
                if FORM == LEVELS:  # no 16-bit type holds these; its library rounds scaled values
                    total = tl.dot((w * scale[:, None]).to(TYPE), a, total, input_precision=PRECISION)
                else:
                    total += tl.dot(w, a, input_precision=PRECISION) * scale[:, None]
        else:
            of_input = tl.load(groups + place, place < k, 0)
            at = of_input[None, :] * n + outputs[:, None]
            inside = real[:, None] & (place < k)[None, :]
            if ZEROS == 2:
                w = w - tl.load(zero_base + at, inside, 0).to(TYPE)
            elif ZEROS == 1:
                w = w - zero[:, None]
            scale = _constants(scale_base + at, inside, E4M3_SCALES)
            total += tl.dot((w.to(tl.float32) * (scale * LARGER)).to(TYPE), a, input_precision=PRECISION)
    if COLUMNS and ONE:
        total *= _constants(scale_base + outputs, real, E4M3_SCALES)[:, None]
    total *= (tl.load(units + expert * n + outputs, real, 0.0) / LARGER)[:, None]
    at = (tl.program_id(2).to(tl.int64) * m + rows.to(tl.int64)[None, :]) * n + outputs[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), (rows < last)[None, :] & real[:, None])


@triton.jit
def widen_kernel(
    out,
    codes,
    levels,
    scales,
    zeros,
    units,
    groups,
    n,
    k,
    begin,
    FORM: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A weight's outputs from `begin` on, as out [outputs, k] has them. Grid [outputs / OUTPUTS, k / INPUTS]; int32
    groups [k]; the others as in `product_kernel`."""
    outputs = begin + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = tl.program_id(1) * INPUTS
    place = start + tl.arange(0, INPUTS)
    inside = (outputs < n)[:, None] & (place < k)[None, :]
    w = _tile(codes, levels, n, k, outputs, start, FORM, INPUTS, tl.float32)
    at = tl.load(groups + place, place < k, 0)[None, :] * n + outputs[:, None]
    if ZEROS == 2:
        w -= tl.load(zeros + at, inside, 0).to(tl.float32)
    elif ZEROS == 1:
        w -= tl.load(zeros + outputs, outputs < n, 0).to(tl.float32)[:, None]
    w *= _constants(scales + at, inside, E4M3_SCALES)
    w *= tl.load(units + outputs, outputs < n, 0.0)[:, None]
    tl.store(out + (outputs - begin).to(tl.int64)[:, None] * k + place[None, :], w.to(out.dtype.element_ty), inside)
