"""Powers of two of many numbers, and hyperbolic tangents: what softmax, its caps and gates are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

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
    spread,
    store,
)

GELU_SLOPE, GELU_BEND = math.sqrt(8 / math.pi), 0.044715
"""gelu(x) is about x · logistic(slope · (x + bend · x³))."""

_FOUR = 4
"""Vectors that are worked at side by side, since a sum of two waits for the one before it."""
_LEAST = -200.0
"""An exponent of two that gives 0 in float32."""
_BIAS, _INFINITE = 127.0, 128.0
"""Of the exponents of float32: what is added to them, and the first that is none of a number."""
_SCALES = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
"""Whether one instruction multiplies with powers of two, as AVX-512's does."""
_POWERS = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)
"""2^x between -½ and ½, interpolated at Chebyshev's points: less than 2 · 10⁻⁷ off."""

_FLAT = 9.0
"""From here on a hyperbolic tangent is 1 in float32."""
_ABOVE = 1.0, 1.33810295e-1, 3.49559248e-3, 2.06091470e-5, 1.33547394e-8
_BELOW = 1.0, 4.67143451e-1, 2.58769993e-2, 3.28564162e-4, 7.77659261e-7
"""tanh(x) up to there is x · above(x²) / below(x²), fitted by least squares of the relative error: 4 · 10⁻⁷ off, with
what float32 rounds."""


def _highest(_: Any, _place: Any, _fours: Any) -> Any:
    """The highest number at an address, of four times so many vectors; what is not a number counts as none."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        def better(known: Value, place: Value) -> Value:
            return higher(builder, load(builder, place, VECTOR), known)

        first, second, third, last = _over_fours(builder, *given, begin=-np.inf, step=better)
        best = higher(builder, higher(builder, first, second), higher(builder, third, last))
        reduce = declared(builder, "llvm.vector.reduce.fmax.v16f32", SINGLE, [VECTOR])
        return builder.call(reduce, [best], fastmath=("nnan",))

    return types.float32(types.intp, types.intp), generate


def _to_powers(_: Any, _place: Any, _fours: Any, _less: Any) -> Any:
    """Turns each number x at an address, of four times so many vectors, into 2^(x - less), and gives their sum.

    x - less is at most 126, and where it is below float32's exponents gives 0; what is not a number stays so.
    """

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        address, fours, less = given
        less = spread(builder, less)

        def raised(total: Value, place: Value) -> Value:
            power = _power(builder, builder.fsub(load(builder, place, VECTOR), less))
            store(builder, power, place)
            return builder.fadd(total, power)

        first, second, third, last = _over_fours(builder, address, fours, begin=0.0, step=raised)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, last))
        reduce = declared(builder, "llvm.vector.reduce.fadd.v16f32", SINGLE, [SINGLE, VECTOR])
        return builder.call(reduce, [SINGLE(-0.0), total], fastmath=("reassoc",))

    return types.float32(types.intp, types.intp, types.float32), generate


def _to_short_powers(_: Any, _out: Any, _place: Any, _fours: Any, _scale: Any, _less: Any) -> Any:
    """Writes 2^(x · scale - less) of each number x at an address, of four times so many vectors, to `out` as bfloat16,
    and gives the sum of what was not rounded yet. Otherwise as `to_powers`."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, address, fours, scale, less = given
        scale, less = spread(builder, scale), builder.fneg(spread(builder, less))
        known = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_FOUR)]
        with cgutils.for_range(builder, fours) as loop:
            place = at(builder, address, loop.index, WORD(_FOUR * LINE))
            powers = []
            for index, total in enumerate(known):
                number = load(builder, plus(builder, place, LINE * index), VECTOR)
                powers.append(_power(builder, multiply_add(builder, number, scale, less)))
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
    """32 bfloat16 of two vectors, one behind the other, as a vector. LLVM takes numbers of 16 bits for them."""
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    convert = declared(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", shorts, [VECTOR, VECTOR])
    return builder.bitcast(builder.call(convert, [second, first]), VECTOR)


def _over_fours(
    builder: Any, address: Value, fours: Value, *, begin: float, step: Callable[[Value, Value], Value]
) -> list[Value]:
    """Four results that begin as vectors of `begin`, each taken a step further with every fourth vector's address: as
    many as an adder works at together."""
    known = [cgutils.alloca_once_value(builder, constant(begin)) for _ in range(_FOUR)]
    with cgutils.for_range(builder, fours) as loop:
        for index, one in enumerate(known):
            place = at(builder, address, loop.index, WORD(_FOUR * LINE), LINE * index)
            builder.store(step(builder.load(one), place), one)
    return [builder.load(one) for one in known]


def _cap(_: Any, _place: Any, _fours: Any, _scale: Any, _cap: Any) -> Any:
    """Turns each number x at an address, of four times so many vectors, into cap · tanh(x · scale / cap); what is not a
    number stays so."""

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
    """Sets so many vectors at `out` to silu(gate) · value, of gates and values at two other addresses."""
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
        out, gates, values, vectors = given
        with cgutils.for_range(builder, vectors) as loop:
            places = [at(builder, base, loop.index, WORD(LINE)) for base in (gates, values)]
            gate, value = (load(builder, place, VECTOR) for place in places)
            power = _power(builder, builder.fmul(steepened(builder, gate), constant(-math.log2(math.e))))
            opened = builder.fdiv(gate, builder.fadd(power, constant(1.0)))
            store(builder, builder.fmul(opened, value), at(builder, out, loop.index, WORD(LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _power(builder: Any, x: Value) -> Value:
    """2^x of a vector: a polynomial for the part between -½ and ½, moved by the whole part."""
    x = higher(builder, constant(_LEAST), x)
    whole = builder.call(declared(builder, "llvm.rint.v16f32", VECTOR, [VECTOR]), [x])
    part = builder.fsub(x, whole)
    *coefficients, value = (constant(float(coefficient)) for coefficient in _POWERS.coef)
    for coefficient in reversed(coefficients):
        value = multiply_add(builder, value, part, coefficient)
    if _SCALES:
        mask, as_set = ir.IntType(LANES), FLAG
        scale = declared(builder, "llvm.x86.avx512.mask.scalef.ps.512", VECTOR, [VECTOR] * 3 + [mask, as_set])
        return builder.call(scale, [value, whole, value, mask(-1), as_set(4)])
    # The whole part becomes an exponent: the highest stands for infinity, and what is below the least gives 0.
    bounded = builder.select(builder.fcmp_ordered("<", whole, constant(_INFINITE)), whole, constant(_INFINITE))
    exponent = builder.fptosi(builder.fadd(bounded, constant(_BIAS)), WHOLE)
    moved = builder.fmul(value, builder.bitcast(builder.shl(exponent, flags(23)), VECTOR))
    return builder.select(builder.fcmp_ordered("<", whole, constant(1.0 - _BIAS)), constant(0.0), moved)


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
highest: Any = intrinsic(_highest)
to_powers: Any = intrinsic(_to_powers)
to_short_powers: Any = intrinsic(_to_short_powers)
gate: Any = intrinsic(_gate)
gelu_gate: Any = intrinsic(_gelu_gate)


@numba.njit(inline="always")
def hide_others(scores: Any, begin: Any, end: Any, room: Any) -> None:
    """Of the first `room` scores leaves those from begin to end, which may be anywhere; the others become -inf."""
    for place in range(min(begin, room)):
        scores[place] = -np.inf
    for place in range(max(0, end), room):
        scores[place] = -np.inf
