"""Inner loops over vectors of 16 float32, written in LLVM's own terms for numba's kernels.

numba has no vectors that stay in registers over a loop, and its compiler takes half of the width that a processor has.
What uses these is compiled with `made_of`, so that its compiled form on disk notices changes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
FLOAT = 4
"""Bytes."""
LINE = LANES * FLOAT
"""Bytes of a vector, and of a line of a cache."""

Value = Any
"""A value of LLVM's, as its builder gives them."""

_WORD, _FLAG, _SINGLE, _BYTE = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(8)
_VECTOR, _WHOLE = ir.VectorType(_SINGLE, LANES), ir.VectorType(_FLAG, LANES)
_FOUR = 4
"""Vectors that are worked at side by side, since a sum of two waits for the one before it."""
_LEAST = -200.0
"""An exponent of two that gives 0 in float32."""
_POWERS = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)
"""2^x between -½ and ½, interpolated at Chebyshev's points: less than 2 · 10⁻⁷ off."""


def available() -> bool:
    """Whether this processor has such vectors."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _add_products(_: Any, rows: Any, vectors: Any, lines: Any, _places: Any, _count: Any) -> Any:
    """For each of `rows` rows: out[0:w] += Σ over `count` > 0 inputs of x[input] · weights[input, 0:w].

    w is 16 · `vectors`; `rows`, `vectors` and `lines` are literals, rows · vectors at most 24, since the sums stay in
    registers; `places` are (address of out, bytes from one row of it to the next, the same of x, address of weights,
    address of what comes next). For each input it also asks for `lines` lines of what comes next.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (rows, vectors, lines)):
        return None  # numba asks again, with what it knows of constants
    signature = types.void(rows, vectors, lines, types.UniTuple(types.intp, 6), types.intp)
    shape = rows.literal_value, vectors.literal_value, lines.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        _write_products(builder, shape, cgutils.unpack_tuple(builder, given[3]), given[4])
        return context.get_dummy_value()

    return signature, generate


def _write_products(builder: Any, shape: tuple[int, int, int], places: Sequence[Value], count: Value) -> None:
    """The loop over inputs, with the sums of all rows in registers."""
    (rows, vectors, lines), (out, out_step, x, x_step, weights, coming) = shape, places
    parts = range(vectors)
    prefetch = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), [_BYTE.as_pointer(), _FLAG, _FLAG, _FLAG])
    ends = [[_at(builder, out, _WORD(row), out_step, LINE * part) for part in parts] for row in range(rows)]
    before, begin = builder.block, [[_load(builder, end, _VECTOR) for end in row] for row in ends]
    loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(_WORD)
    sums = [[builder.phi(_VECTOR) for _ in parts] for _ in range(rows)]
    lanes = [_at(builder, weights, index, _WORD(LINE * vectors), LINE * part) for part in parts]
    weight = [_load(builder, lane, _VECTOR) for lane in lanes]
    for line in range(lines):
        address = _at(builder, coming, index, _WORD(LINE * lines), LINE * line)
        # To read, often, as data.
        builder.call(prefetch, [_pointer(builder, address, _BYTE), _FLAG(0), _FLAG(3), _FLAG(1)])
    totals = []
    for row in range(rows):
        place = _at(builder, _at(builder, x, _WORD(row), x_step), index, _WORD(FLOAT))
        number = _spread(builder, _load(builder, place, _SINGLE))
        totals.append([_multiply_add(builder, number, weight[part], sums[row][part]) for part in parts])
    following = builder.add(index, _WORD(1))
    index.add_incoming(_WORD(0), before)
    index.add_incoming(following, loop)
    for row in range(rows):
        for part in parts:
            sums[row][part].add_incoming(begin[row][part], before)
            sums[row][part].add_incoming(totals[row][part], loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

    builder.position_at_end(after)
    for row in range(rows):
        for part in parts:
            _store(builder, totals[row][part], ends[row][part])


def _highest(_: Any, _place: Any, _fours: Any) -> Any:
    """The highest number at an address, of four times so many vectors; what is not a number counts as none."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        def higher(known: Value, place: Value) -> Value:
            return _higher(builder, _load(builder, place, _VECTOR), known)

        first, second, third, last = _over_fours(builder, *given, begin=-np.inf, step=higher)
        best = _higher(builder, _higher(builder, first, second), _higher(builder, third, last))
        reduce = _declared(builder, "llvm.vector.reduce.fmax.v16f32", _SINGLE, [_VECTOR])
        return builder.call(reduce, [best], fastmath=("nnan",))

    return types.float32(types.intp, types.intp), generate


def _to_powers(_: Any, _place: Any, _fours: Any, _less: Any) -> Any:
    """Turns each number x at an address, of four times so many vectors, into 2^(x - less), and gives their sum.

    x - less is at most 126, and where it is below float32's exponents gives 0; what is not a number stays so.
    """

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        address, fours, less = given
        less = _spread(builder, less)

        def raised(total: Value, place: Value) -> Value:
            power = _power(builder, builder.fsub(_load(builder, place, _VECTOR), less))
            _store(builder, power, place)
            return builder.fadd(total, power)

        first, second, third, last = _over_fours(builder, address, fours, begin=0.0, step=raised)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, last))
        reduce = _declared(builder, "llvm.vector.reduce.fadd.v16f32", _SINGLE, [_SINGLE, _VECTOR])
        return builder.call(reduce, [_SINGLE(-0.0), total], fastmath=("reassoc",))

    return types.float32(types.intp, types.intp, types.float32), generate


def _gate(_: Any, _out: Any, _gates: Any, _values: Any, _vectors: Any) -> Any:
    """Sets so many vectors at `out` to silu(gate) · value, of gates and values at two other addresses."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, gates, values, vectors = given
        with cgutils.for_range(builder, vectors) as loop:
            places = [_at(builder, base, loop.index, _WORD(LINE)) for base in (gates, values)]
            gate, value = (_load(builder, place, _VECTOR) for place in places)
            power = _power(builder, builder.fmul(gate, _constant(-math.log2(math.e))))
            opened = builder.fdiv(gate, builder.fadd(power, _constant(1.0)))
            _store(builder, builder.fmul(opened, value), _at(builder, out, loop.index, _WORD(LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _over_fours(
    builder: Any, address: Value, fours: Value, *, begin: float, step: Callable[[Value, Value], Value]
) -> list[Value]:
    """Four results that begin as vectors of `begin`, each taken a step further with every fourth vector's address: as
    many as an adder works at together."""
    known = [cgutils.alloca_once_value(builder, _constant(begin)) for _ in range(_FOUR)]
    with cgutils.for_range(builder, fours) as loop:
        for index, one in enumerate(known):
            place = _at(builder, address, loop.index, _WORD(_FOUR * LINE), LINE * index)
            builder.store(step(builder.load(one), place), one)
    return [builder.load(one) for one in known]


def _higher(builder: Any, one: Value, other: Value) -> Value:
    """The higher of each two; the other where one is not a number."""
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _power(builder: Any, x: Value) -> Value:
    """2^x of a vector: a polynomial for the part between -½ and ½, moved by the whole part."""
    x = _higher(builder, _constant(_LEAST), x)
    whole = builder.call(_declared(builder, "llvm.rint.v16f32", _VECTOR, [_VECTOR]), [x])
    part = builder.fsub(x, whole)
    *coefficients, value = (_constant(float(coefficient)) for coefficient in _POWERS.coef)
    for coefficient in reversed(coefficients):
        value = _multiply_add(builder, value, part, coefficient)
    mask, as_set = ir.IntType(LANES), _FLAG
    scale = _declared(builder, "llvm.x86.avx512.mask.scalef.ps.512", _VECTOR, [_VECTOR] * 3 + [mask, as_set])
    return builder.call(scale, [value, whole, value, mask(-1), as_set(4)])


def _at(builder: Any, base: Value, index: Value, step: Value, more: int = 0) -> Value:
    return builder.add(builder.add(base, builder.mul(index, step)), _WORD(more))


def _pointer(builder: Any, address: Value, kind: Any) -> Value:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Value, kind: Any) -> Value:
    value = builder.load(_pointer(builder, address, kind))
    value.align = FLOAT
    return value


def _store(builder: Any, value: Value, address: Value) -> None:
    builder.store(value, _pointer(builder, address, _VECTOR)).align = FLOAT


def _constant(number: float) -> Value:
    return ir.Constant(_VECTOR, [number] * LANES)


def _spread(builder: Any, number: Value) -> Value:
    """A vector of one number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _FLAG(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WHOLE, [0] * LANES))


def _multiply_add(builder: Any, one: Value, other: Value, more: Value) -> Value:
    return builder.call(_declared(builder, "llvm.fma.v16f32", _VECTOR, [_VECTOR] * 3), [one, other, more])


def _declared(builder: Any, name: str, result: Any, arguments: Any) -> Value:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


add_products: Any = intrinsic(_add_products)
highest: Any = intrinsic(_highest)
to_powers: Any = intrinsic(_to_powers)
gate: Any = intrinsic(_gate)
