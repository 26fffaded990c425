"""Powers of two of many numbers, and hyperbolic tangents: for softmax, its caps, and gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.jit import exact
from common.cpu.vectors.llvm import (
    FLAG,
    LANES,
    LINE,
    SINGLE,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    at,
    constant,
    declared,
    flags,
    higher,
    load,
    multiply_add,
    plus,
    share,
    spread,
    spread_whole,
    store,
)

GELU_SLOPE, GELU_BEND = math.sqrt(8 / math.pi), 0.044715
"""gelu(x) is about x · logistic(slope · (x + bend · x³))."""

_FOUR = 4
"""Vectors that are worked at side by side, since a sum of two waits for the one before it."""
_LARGE = 2.0**126
"""A divisor whose inverse is about the smallest normal number."""
_DOWNWARDS, _AS_SET = 1, 4
"""Literals of AVX-512: rounding to the whole number below, and as is set for the thread."""
_LEAST = -200.0
"""An exponent of two that gives 0 in float32."""
_BIAS, _INFINITE = 127.0, 128.0
"""The bias of float32's exponents, and the first exponent that is no number's."""
_SCALES = bool(llvmlite.binding.get_host_cpu_features().get("avx512dq"))
"""Whether single instructions, such as AVX-512's, give a number's fraction and multiply with powers of two."""


def _interpolated(degree: int, begin: float, end: float) -> list[float]:
    """The coefficients of a polynomial that is 2^x at Chebyshev's points between two numbers, the constant first."""
    series = np.polynomial.Chebyshev.interpolate(np.exp2, degree, domain=[begin, end])
    return [float(coefficient) for coefficient in series.convert(kind=np.polynomial.Polynomial).coef]


_POWERS = _interpolated(5, 0.0, 1.0) if _SCALES else _interpolated(5, -0.5, 0.5)
"""2^x between the nearest integers or half-integers, with an error below 2 · 10⁻⁷."""
_SHORT_POWERS = _interpolated(4, 0.0, 1.0)
"""The same with an error below 4 · 10⁻⁶, for results that are rounded to bfloat16."""

_FLAT = 9.0
"""From here on a hyperbolic tangent is 1 in float32."""
_ABOVE = 1.0, 1.33810295e-1, 3.49559248e-3, 2.06091470e-5, 1.33547394e-8
_BELOW = 1.0, 4.67143451e-1, 2.58769993e-2, 3.28564162e-4, 7.77659261e-7
"""Up to this x, tanh(x) is x · above(x²) / below(x²), fitted by least squares of the relative error: 4 · 10⁻⁷ with
float32's rounding."""


def _highest(_: Any, _place: Any, _fours: Any) -> Any:
    """The maximum of 4 · `fours` vectors at an address; NaN is ignored."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        def better(known: Value, place: Value) -> Value:
            return higher(builder, load(builder, place, VECTOR), known)

        first, second, third, last = _over_fours(builder, *given, begin=-np.inf, step=better)
        best = higher(builder, higher(builder, first, second), higher(builder, third, last))
        reduce = declared(builder, "llvm.vector.reduce.fmax.v16f32", SINGLE, [VECTOR])
        return builder.call(reduce, [best], fastmath=("nnan",))

    return types.float32(types.intp, types.intp), generate


def _to_powers(_: Any, _place: Any, _fours: Any, _less: Any) -> Any:
    """Replaces each number x of 4 · `fours` vectors at an address by 2^(x − less), and returns the sum.

    x − less is at most 126; below float32's exponents it gives 0; NaN stays NaN.
    """

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        address, fours, less = given
        less = spread(builder, less)

        def raised(total: Value, place: Value) -> Value:
            power = power_of_two(builder, builder.fsub(load(builder, place, VECTOR), less))
            store(builder, power, place)
            return builder.fadd(total, power)

        first, second, third, last = _over_fours(builder, address, fours, begin=0.0, step=raised)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, last))
        reduce = declared(builder, "llvm.vector.reduce.fadd.v16f32", SINGLE, [SINGLE, VECTOR])
        return builder.call(reduce, [SINGLE(-0.0), total], fastmath=("reassoc",))

    return types.float32(types.intp, types.intp, types.float32), generate


def _to_short_powers(_: Any, _out: Any, _place: Any, _fours: Any, _scale: Any, _less: Any) -> Any:
    """Writes 2^(x · scale − less) for each number x of 4 · `fours` vectors at an address to `out` as bfloat16, and
    returns the sum before rounding. Otherwise as `to_powers`."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, address, fours, scale, less = given
        scale, less = spread(builder, scale), builder.fneg(spread(builder, less))
        known = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_FOUR)]
        with cgutils.for_range(builder, fours) as loop:
            place = at(builder, address, loop.index, WORD(_FOUR * LINE))
            powers = []
            for index, total in enumerate(known):
                number = load(builder, plus(builder, place, LINE * index), VECTOR)
                powers.append(short_power_of_two(builder, multiply_add(builder, number, scale, less)))
                builder.store(builder.fadd(builder.load(total), powers[-1]), total)
            for index in range(0, _FOUR, 2):
                end = at(builder, out, loop.index, WORD(_FOUR * LINE // 2), LINE * index // 2)
                store(builder, both_rounded(builder, *powers[index : index + 2]), end)
        first, second, third, last = (builder.load(total) for total in known)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, last))
        reduce = declared(builder, "llvm.vector.reduce.fadd.v16f32", SINGLE, [SINGLE, VECTOR])
        return builder.call(reduce, [SINGLE(-0.0), total], fastmath=("reassoc",))

    return types.float32(types.intp, types.intp, types.intp, types.float32, types.float32), generate


def both_rounded(builder: Any, first: Value, second: Value) -> Value:
    """32 bfloat16 from two vectors, one after the other. LLVM takes 16-bit integers for them."""
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    convert = declared(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", shorts, [VECTOR, VECTOR])
    return builder.bitcast(builder.call(convert, [second, first]), VECTOR)


def _over_fours(
    builder: Any, address: Value, fours: Value, *, begin: float, step: Callable[[Value, Value], Value]
) -> list[Value]:
    """Four results that start as vectors of `begin`; each is updated with every fourth vector's address, so that four
    independent additions are in flight."""
    known = [cgutils.alloca_once_value(builder, constant(begin)) for _ in range(_FOUR)]
    with cgutils.for_range(builder, fours) as loop:
        for index, one in enumerate(known):
            place = at(builder, address, loop.index, WORD(_FOUR * LINE), LINE * index)
            builder.store(step(builder.load(one), place), one)
    return [builder.load(one) for one in known]


def _hide_others(_: Any, _place: Any, _fours: Any, _begin: Any, _end: Any) -> Any:
    """Keeps numbers [begin, end) of 4 · `fours` vectors at an address and sets the others to −inf; begin and end may
    lie anywhere."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        address, fours, begin, end = given
        lanes = ir.Constant(WHOLE, list(range(LANES)))
        room = builder.mul(fours, WORD(_FOUR * LANES))
        bounds = []
        for bound in (begin, end):
            inside = builder.select(builder.icmp_signed("<", bound, WORD(0)), WORD(0), bound)
            inside = builder.select(builder.icmp_signed(">", inside, room), room, inside)
            bounds.append(spread_whole(builder, builder.trunc(inside, FLAG)))
        hides = builder.or_(builder.icmp_signed(">", begin, WORD(0)), builder.icmp_signed("<", end, room))
        with builder.if_then(hides), cgutils.for_range(builder, builder.mul(fours, WORD(_FOUR))) as loop:
            place = at(builder, address, loop.index, WORD(LINE))
            first = spread_whole(builder, builder.trunc(builder.mul(loop.index, WORD(LANES)), FLAG))
            here = builder.add(lanes, first)
            shown = builder.and_(builder.icmp_signed(">=", here, bounds[0]), builder.icmp_signed("<", here, bounds[1]))
            store(builder, builder.select(shown, load(builder, place, VECTOR), constant(-np.inf)), place)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _cap(_: Any, _place: Any, _fours: Any, _scale: Any, _cap: Any) -> Any:
    """Replaces each number x of 4 · `fours` vectors at an address by cap · tanh(x · scale / cap); NaN stays NaN."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        address, fours, scale, cap = given
        steepness, cap = spread(builder, builder.fdiv(scale, cap)), spread(builder, cap)
        with cgutils.for_range(builder, fours) as loop:
            for index in range(_FOUR):
                place = at(builder, address, loop.index, WORD(_FOUR * LINE), LINE * index)
                tangent = _tangent(builder, builder.fmul(load(builder, place, VECTOR), steepness))
                store(builder, builder.fmul(tangent, cap), place)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.float32), generate


def _gate(_: Any, _out: Any, _gates: Any, _values: Any, _vectors: Any) -> Any:
    """Writes silu(gate) · value to `out`, for `vectors` vectors of gates and values at two other addresses."""
    return _gating(lambda _, gate: gate)


def _gelu_gate(_: Any, _out: Any, _gates: Any, _values: Any, _vectors: Any) -> Any:
    """The same with gelu(gate), by its hyperbolic tangent: 1 + tanh(x / 2) is twice the logistic function of x."""

    def bent(builder: Any, gate: Value) -> Value:
        square, slope = builder.fmul(gate, gate), constant(GELU_SLOPE)
        return builder.fmul(gate, multiply_add(builder, square, constant(GELU_SLOPE * GELU_BEND), slope))

    return _gating(bent)


def _gating(steepened: Callable[[Any, Value], Value]) -> Any:
    """gate · logistic(steepened gate) · value."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        share(builder)
        out, gates, values, vectors = given
        with cgutils.for_range(builder, vectors) as loop:
            places = [at(builder, base, loop.index, WORD(LINE)) for base in (gates, values)]
            gate, value = (load(builder, place, VECTOR) for place in places)
            power = power_of_two(builder, builder.fmul(steepened(builder, gate), constant(-math.log2(math.e))))
            opened = _quotient(builder, gate, builder.fadd(power, constant(1.0)))
            store(builder, builder.fmul(opened, value), at(builder, out, loop.index, WORD(LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def power_of_two(builder: Any, x: Value, coefficients: Sequence[float] = _POWERS) -> Value:
    """2^x of a vector: a polynomial of the fraction, scaled by the integer part; −inf gives 0."""
    if _SCALES:
        both = [VECTOR, FLAG, VECTOR, ir.IntType(LANES), FLAG]
        reduce = declared(builder, "llvm.x86.avx512.mask.reduce.ps.512", VECTOR, both)
        scale = declared(builder, "llvm.x86.avx512.mask.scalef.ps.512", VECTOR, [VECTOR] * 3 + both[3:])
        part = builder.call(reduce, [x, FLAG(_DOWNWARDS), x, ir.IntType(LANES)(-1), FLAG(_AS_SET)])
        value = _polynomial(builder, part, coefficients)
        # Subnormal results are flushed to 0: computing with them takes thirty times as long.
        normal = builder.fcmp_unordered(">=", x, constant(1.0 - _BIAS))
        x = builder.select(normal, x, constant(-np.inf))
        return builder.call(scale, [value, x, value, ir.IntType(LANES)(-1), FLAG(_AS_SET)])
    x = higher(builder, constant(_LEAST), x)
    # Infinity has no fraction; NaN stays NaN.
    x = builder.select(builder.fcmp_ordered(">", x, constant(_INFINITE)), constant(_INFINITE), x)
    whole = builder.call(declared(builder, "llvm.rint.v16f32", VECTOR, [VECTOR]), [x])
    value = _polynomial(builder, builder.fsub(x, whole), coefficients)
    # The integer part becomes an exponent: the highest stands for infinity, and those below the lowest give 0.
    bounded = builder.select(builder.fcmp_ordered("<", whole, constant(_INFINITE)), whole, constant(_INFINITE))
    exponent = builder.fptosi(builder.fadd(bounded, constant(_BIAS)), WHOLE)
    moved = builder.fmul(value, builder.bitcast(builder.shl(exponent, flags(23)), VECTOR))
    return builder.select(builder.fcmp_ordered("<", whole, constant(1.0 - _BIAS)), constant(0.0), moved)


def short_power_of_two(builder: Any, x: Value) -> Value:
    """The same for results that are rounded to bfloat16, on processors that do so, all of which have AVX-512."""
    return power_of_two(builder, x, _SHORT_POWERS)


def _polynomial(builder: Any, x: Value, coefficients: Sequence[float]) -> Value:
    *lower, value = (constant(coefficient) for coefficient in coefficients)
    for coefficient in reversed(lower):
        value = multiply_add(builder, value, x, coefficient)
    return value


def _quotient(builder: Any, number: Value, divisor: Value) -> Value:
    """number / divisor for divisors of at least 1. With AVX-512 it takes an estimate and a step of Newton's method, a
    third of a division's time. A divisor that is too large for it gives the result of the largest that is not."""
    if not _SCALES:
        return builder.fdiv(number, divisor)
    large = builder.fcmp_ordered(">", divisor, constant(_LARGE))
    divisor = builder.select(large, constant(_LARGE), divisor)
    kinds = [VECTOR, VECTOR, ir.IntType(LANES)]
    inverse = declared(builder, "llvm.x86.avx512.rcp14.ps.512", VECTOR, kinds)
    near = builder.call(inverse, [divisor, divisor, ir.IntType(LANES)(-1)])
    off = multiply_add(builder, builder.fneg(divisor), near, constant(1.0))
    return builder.fmul(number, multiply_add(builder, near, off, near))


def _tangent(builder: Any, x: Value) -> Value:
    """The hyperbolic tangent of a vector."""
    x = higher(builder, constant(-_FLAT), x)
    x = builder.select(builder.fcmp_ordered(">", x, constant(_FLAT)), constant(_FLAT), x)
    square, parts = builder.fmul(x, x), []
    for coefficients in (_ABOVE, _BELOW):
        *lower, value = (constant(coefficient) for coefficient in coefficients)
        for coefficient in reversed(lower):
            value = multiply_add(builder, value, square, coefficient)
        parts.append(value)
    return builder.fmul(x, builder.fdiv(*parts))


cap: Any = intrinsic(_cap)
hide_others: Any = intrinsic(_hide_others)
highest: Any = intrinsic(_highest)
to_powers: Any = intrinsic(_to_powers)
to_short_powers: Any = intrinsic(_to_short_powers)
_gate_code: Any = intrinsic(_gate)
_gelu_gate_code: Any = intrinsic(_gelu_gate)


@exact
def gate(out: Any, gates: Any, values: Any, vectors: Any) -> None:
    """See `_gate`: the same to the bit in every kernel."""
    _gate_code(out, gates, values, vectors)


@exact
def gelu_gate(out: Any, gates: Any, values: Any, vectors: Any) -> None:
    """See `_gelu_gate`."""
    _gelu_gate_code(out, gates, values, vectors)
