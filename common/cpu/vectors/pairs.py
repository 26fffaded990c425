"""Rows of words laid out for products of pairs: words of one place side by side, or numbers of two rows in turns."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    FLAG,
    FLOAT,
    LANES,
    LINE,
    SHORTS,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    at,
    declared,
    flags,
    load,
    places,
    pointer,
    spread_whole,
    store,
)

HALF = LANES // 2
"""Words of a row that `interleave` takes: 16 numbers of 16 bits."""


_MASK = ir.VectorType(ir.IntType(1), LANES)


def _transpose(_: Any, _out: Any, _out_step: Any, _x: Any, _x_step: Any) -> Any:
    """Transposes 16 × 16 words, from rows at one address to rows at another, each with its own row stride in bytes.

    It takes four turns, with blocks of 8, 4, 2 and 1: the upper right and the lower left block of each square of four
    are swapped.
    """

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, out_step, x, x_step = given
        rows = [load(builder, at(builder, x, WORD(row), x_step), WHOLE) for row in range(LANES)]
        for half in (8, 4, 2, 1):
            upper = [lane if lane & half == 0 else LANES + lane - half for lane in range(LANES)]
            lower = [lane + half if lane & half == 0 else LANES + lane for lane in range(LANES)]
            for row in range(LANES):
                if row & half == 0:
                    both = rows[row], rows[row + half]
                    rows[row], rows[row + half] = (
                        builder.shuffle_vector(*both, places(lanes)) for lanes in (upper, lower)
                    )
        for row, words in enumerate(rows):
            store(builder, builder.bitcast(words, VECTOR), at(builder, out, WORD(row), out_step))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _interleave(_: Any, _out: Any, _one: Any, _other: Any) -> Any:
    """Writes to an address the numbers of 16 bits, 16 each, that lie at two others, in turns."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, *both = given
        one, other = (load(builder, place, SHORTS, size=4) for place in both)
        turns = places([lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair])
        store(builder, builder.bitcast(builder.shuffle_vector(one, other, turns), VECTOR), out)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _copy(_: Any, _out: Any, _x: Any, _vectors: Any) -> Any:
    """Copies vectors from an address to another."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, vectors = given
        with cgutils.for_range(builder, vectors) as loop:
            to, place = (at(builder, base, loop.index, WORD(LINE)) for base in (out, x))
            store(builder, load(builder, place, VECTOR), to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _fill(_: Any, _out: Any, _x: Any, _count: Any, _room: Any) -> Any:
    """Copies `count` words from an address to another and fills up with zeros to `room` words, a multiple of 16."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, count, room = given
        kinds = [WHOLE.as_pointer(), FLAG, _MASK, WHOLE]
        masked = declared(builder, "llvm.masked.load.v16i32.p0", WHOLE, kinds)
        with cgutils.for_range(builder, builder.sdiv(room, WORD(LANES))) as loop:
            first = builder.mul(loop.index, WORD(LANES))
            left = spread_whole(builder, builder.trunc(builder.sub(count, first), FLAG))
            there = builder.icmp_signed("<", ir.Constant(WHOLE, list(range(LANES))), left)
            to, place = (at(builder, base, first, WORD(FLOAT)) for base in (out, x))
            words = builder.call(masked, [pointer(builder, place, WHOLE), FLAG(FLOAT), there, flags(0)])
            store(builder, builder.bitcast(words, VECTOR), to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


copy: Any = intrinsic(_copy)
fill: Any = intrinsic(_fill)
transpose: Any = intrinsic(_transpose)
interleave: Any = intrinsic(_interleave)
