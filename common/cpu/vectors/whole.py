"""Rows of float32 as whole numbers of 8 bits."""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    BYTES,
    FLAG,
    LANES,
    LINE,
    SINGLE,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    at,
    declared,
    flags,
    load,
    load_vector,
    pointer,
    spread,
)

LOWEST, HIGHEST = -128, 127
_MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign. As integers they have the order of the numbers' absolute values, with
infinity above all numbers and NaN above that."""


def _largest_magnitude(_: Any, _x: Any, _vectors: Any) -> Any:
    """The largest absolute value of the float32 of `vectors` vectors at an address; NaN if there is one."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        x, vectors = given
        found = cgutils.alloca_once_value(builder, flags(0))
        with cgutils.for_range(builder, vectors) as loop:
            bits = load(builder, at(builder, x, loop.index, WORD(LINE)), WHOLE)
            magnitudes, known = builder.and_(bits, flags(_MAGNITUDE)), builder.load(found)
            higher = builder.select(builder.icmp_unsigned(">", magnitudes, known), magnitudes, known)
            builder.store(higher, found)
        largest = builder.call(
            declared(builder, "llvm.vector.reduce.umax.v16i32", FLAG, [WHOLE]), [builder.load(found)]
        )
        return builder.bitcast(largest, SINGLE)

    return types.float32(types.intp, types.intp), generate


def _round_to_bytes(_: Any, _out: Any, _x: Any, _scale: Any, _vectors: Any) -> Any:
    """Divides the float32 of `vectors` vectors at an address by a scale and writes them to another as int8: the
    nearest, halves to even, between −128 and 127. Returns their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, scale, vectors = given
        divisor, total = spread(builder, scale), cgutils.alloca_once_value(builder, flags(0))
        near = declared(builder, "llvm.nearbyint.v16f32", VECTOR, [VECTOR])
        with cgutils.for_range(builder, vectors) as loop:
            numbers = load_vector(builder, at(builder, x, loop.index, WORD(LINE)))
            steps = builder.fdiv(numbers, divisor)
            for bound, beyond in ((HIGHEST, ">"), (LOWEST, "<")):  # before they are whole: 32 bits may not hold them
                least = spread(builder, SINGLE(bound))
                steps = builder.select(builder.fcmp_ordered(beyond, steps, least), least, steps)
            whole = builder.fptosi(builder.call(near, [steps]), WHOLE)
            builder.store(builder.add(whole, builder.load(total)), total)
            place = pointer(builder, at(builder, out, loop.index, WORD(LANES)), BYTES)
            builder.store(builder.trunc(whole, BYTES), place).align = 1
        add_up = declared(builder, "llvm.vector.reduce.add.v16i32", FLAG, [WHOLE])
        return builder.call(add_up, [builder.load(total)])

    return types.int32(types.intp, types.intp, types.float32, types.intp), generate


largest_magnitude: Any = intrinsic(_largest_magnitude)
round_to_bytes: Any = intrinsic(_round_to_bytes)
