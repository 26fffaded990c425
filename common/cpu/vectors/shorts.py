"""Rows of bfloat16 with float32 arithmetic: rotary embeddings, norms and activations. The last vector of a row may be
partial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    FLAG,
    LANES,
    SHORTS,
    SINGLE,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    at,
    constant,
    declared,
    flags,
    load,
    multiply_add,
    pointer,
    spread,
)
from common.cpu.vectors.powers import short_power_of_two
from common.cpu.vectors.row_loops import MASK, Mask, inverse_root, load_wide, over, total

SHORT = 2
"""Bytes."""
_STEEPEST = 60.0
"""An exponent of two: what is divided by this power is practically 0, but still normal; arithmetic with subnormal
numbers takes a hundred times as long."""


def _load(builder: Any, base: Value, first: Value, mask: Mask) -> Value:
    """Loads bfloat16 as float32; lanes outside of the mask are 0."""
    place = at(builder, base, first, WORD(SHORT))
    if mask is None:
        shorts = load(builder, place, SHORTS, size=SHORT)
    else:
        kinds = [SHORTS.as_pointer(), FLAG, MASK, SHORTS]
        masked = declared(builder, "llvm.masked.load.v16i16.p0", SHORTS, kinds)
        none = ir.Constant(SHORTS, [0] * LANES)
        shorts = builder.call(masked, [pointer(builder, place, SHORTS), FLAG(SHORT), mask, none])
    return builder.bitcast(builder.shl(builder.zext(shorts, WHOLE), flags(16)), VECTOR)


def _store(builder: Any, value: Value, base: Value, first: Value, mask: Mask) -> None:
    """float32 as bfloat16."""
    rounded = builder.call(declared(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", SHORTS, [VECTOR]), [value])
    place = pointer(builder, at(builder, base, first, WORD(SHORT)), SHORTS)
    if mask is None:
        builder.store(rounded, place).align = SHORT
    else:
        kinds = [SHORTS, SHORTS.as_pointer(), FLAG, MASK]
        masked = declared(builder, "llvm.masked.store.v16i16.p0", ir.VoidType(), kinds)
        builder.call(masked, [rounded, place, FLAG(SHORT), mask])


def _rotate(_: Any, _out: Any, _head: Any, _tables: Any, _half: Any) -> Any:
    """Rotates the first `half` numbers of a head with the `half` behind them and writes them to an address, which may
    be the head's own. `tables` are the addresses of cosines and sines for the first half, then for the second."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, head, tables, half = given
        behind = builder.mul(half, WORD(SHORT))

        def step(first: Value, mask: Mask) -> None:
            cos, sin, later_cos, later_sin = (
                load_wide(builder, table, first, mask) for table in cgutils.unpack_tuple(builder, tables)
            )
            one, other = (_load(builder, base, first, mask) for base in (head, builder.add(head, behind)))
            less = builder.fneg(builder.fmul(other, sin))
            _store(builder, multiply_add(builder, one, cos, less), out, first, mask)
            more = builder.fmul(one, later_sin)
            _store(builder, multiply_add(builder, other, later_cos, more), builder.add(out, behind), first, mask)

        over(builder, half, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.UniTuple(types.intp, 4), types.intp), generate


def _norm_row(_: Any, _out: Any, _x: Any, _parameters: Any, _count: Any, _eps: Any) -> Any:
    """Layer norm of a row, written to an address, which may be its own; `parameters` are the addresses of the weight
    and the bias."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, parameters, count, eps = given
        weight, bias = cgutils.unpack_tuple(builder, parameters)
        share = builder.fdiv(SINGLE(1.0), builder.sitofp(count, SINGLE))
        mean = spread(builder, builder.fmul(total(builder, count, lambda *at_: _load(builder, x, *at_)), share))

        def off(first: Value, mask: Mask) -> Value:
            part = builder.fsub(_load(builder, x, first, mask), mean)
            return part if mask is None else builder.select(mask, part, constant(0.0))

        def square(first: Value, mask: Mask) -> Value:
            part = off(first, mask)
            return builder.fmul(part, part)

        scale = spread(builder, inverse_root(builder, count, square, eps))

        def step(first: Value, mask: Mask) -> None:
            factor, more = (_load(builder, base, first, mask) for base in (weight, bias))
            part = builder.fmul(off(first, mask), scale)
            _store(builder, multiply_add(builder, part, factor, more), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    pair = types.UniTuple(types.intp, 2)
    return types.void(types.intp, types.intp, pair, types.intp, types.float32), generate


def _rms_norm_row(_: Any, _out: Any, _x: Any, _weight: Any, _count: Any, _eps: Any) -> Any:
    """RMS norm of a row, times a weight, written to an address, which may be its own."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, weight, count, eps = given

        def square(first: Value, mask: Mask) -> Value:
            part = _load(builder, x, first, mask)
            return builder.fmul(part, part)

        scale = spread(builder, inverse_root(builder, count, square, eps))

        def step(first: Value, mask: Mask) -> None:
            part, factor = (_load(builder, base, first, mask) for base in (x, weight))
            _store(builder, builder.fmul(builder.fmul(part, scale), factor), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.float32), generate


def _add_row(_: Any, _out: Any, _one: Any, _other: Any, _count: Any) -> Any:
    """Writes the sum of two rows to an address, which may be one's own."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, one, other, count = given

        def step(first: Value, mask: Mask) -> None:
            both = (_load(builder, base, first, mask) for base in (one, other))
            _store(builder, builder.fadd(*both), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _round_numbers(_: Any, _out: Any, _x: Any, _count: Any) -> Any:
    """Rounds `count` float32 numbers to bfloat16, from one address to another."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, count = given

        def step(first: Value, mask: Mask) -> None:
            _store(builder, load_wide(builder, x, first, mask), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _gelu_row(_: Any, _x: Any, _count: Any, _slope: Any, _bend: Any) -> Any:
    """x · logistic(slope · (x + bend · x³)) of `count` numbers at an address: an approximation of gelu, by tanh or
    another; with 1 and 0, silu."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        x, count, slope, bend = given
        opened = _opening(builder, slope, bend)

        def step(first: Value, mask: Mask) -> None:
            _store(builder, opened(_load(builder, x, first, mask)), x, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.float32), generate


def _round_sums(_: Any, _out: Any, _sums: Any, _bias: Any, _count: Any) -> Any:
    """Writes sums plus a bias, float32 at two addresses, to another as bfloat16."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, sums, bias, count = given

        def step(first: Value, mask: Mask) -> None:
            _store(builder, _biased(builder, (sums, bias), first, mask), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _add_sums(_: Any, _out: Any, _x: Any, _sums: Any, _bias: Any, _count: Any) -> Any:
    """The same, plus a row at an address, which may be the output's."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, sums, bias, count = given

        def step(first: Value, mask: Mask) -> None:
            total = builder.fadd(_load(builder, x, first, mask), _biased(builder, (sums, bias), first, mask))
            _store(builder, total, out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), generate


def _open_sums(_: Any, _out: Any, _sums: Any, _bias: Any, _count: Any, _slope: Any, _bend: Any) -> Any:
    """As `round_sums`, followed by the activation of `gelu_row`."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, sums, bias, count, slope, bend = given
        opened = _opening(builder, slope, bend)

        def step(first: Value, mask: Mask) -> None:
            _store(builder, opened(_biased(builder, (sums, bias), first, mask)), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    places = types.intp, types.intp, types.intp
    return types.void(*places, types.intp, types.float32, types.float32), generate


def _gate_sums(_: Any, _out: Any, _gates: Any, _values: Any, _count: Any, _slope: Any, _bend: Any) -> Any:
    """Gates through that, times values; of both the addresses of the sums and of the bias."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, gates, values, count, slope, bend = given
        opened = _opening(builder, slope, bend)
        places = [cgutils.unpack_tuple(builder, both) for both in (gates, values)]

        def step(first: Value, mask: Mask) -> None:
            gate, value = (_biased(builder, both, first, mask) for both in places)
            _store(builder, builder.fmul(opened(gate), value), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    pair = types.UniTuple(types.intp, 2)
    return types.void(types.intp, pair, pair, types.intp, types.float32, types.float32), generate


def _biased(builder: Any, both: Sequence[Value], first: Value, mask: Mask) -> Value:
    """A vector of sums and of a bias, added up."""
    return builder.fadd(*(load_wide(builder, base, first, mask) for base in both))


def _opening(builder: Any, slope: Value, bend: Value) -> Callable[[Value], Value]:
    """The function x · logistic(slope · (x + bend · x³)) of a vector."""
    slope = builder.fmul(slope, SINGLE(-math.log2(math.e)))
    line, curve = spread(builder, slope), spread(builder, builder.fmul(slope, bend))
    kinds = [VECTOR, VECTOR, ir.IntType(LANES)]
    # Off by 6 · 10⁻⁵: it is rounded to bfloat16.
    inverse = declared(builder, "llvm.x86.avx512.rcp14.ps.512", VECTOR, kinds)

    def opened(number: Value) -> Value:
        exponent = builder.fmul(number, multiply_add(builder, builder.fmul(number, number), curve, line))
        steep = builder.fcmp_ordered(">", exponent, constant(_STEEPEST))
        exponent = builder.select(steep, constant(_STEEPEST), exponent)
        below = builder.fadd(short_power_of_two(builder, exponent), constant(1.0))
        return builder.fmul(number, builder.call(inverse, [below, below, ir.IntType(LANES)(-1)]))

    return opened


rotate: Any = intrinsic(_rotate)
norm_row: Any = intrinsic(_norm_row)
rms_norm_row: Any = intrinsic(_rms_norm_row)
add_row: Any = intrinsic(_add_row)
round_numbers: Any = intrinsic(_round_numbers)
gelu_row: Any = intrinsic(_gelu_row)
round_sums: Any = intrinsic(_round_sums)
add_sums: Any = intrinsic(_add_sums)
open_sums: Any = intrinsic(_open_sums)
gate_sums: Any = intrinsic(_gate_sums)
