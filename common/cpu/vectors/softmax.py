"""The running softmax (https://arxiv.org/abs/2205.14135) of 16 rows at a time, a panel of 64 keys after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    FLOAT,
    LANES,
    LINE,
    SINGLE,
    VECTOR,
    WORD,
    Value,
    ask,
    at,
    constant,
    higher,
    load,
    multiply_add,
    places,
    plus,
    spread,
    store,
)
from common.cpu.vectors.powers import both_rounded, power_of_two, short_power_of_two

ROWS = LANES
"""Rows of a step."""
STATE = (2 + ROWS) * LANES
"""The size of an online softmax's state for `ROWS` rows: their bases, −inf before the first score; the factors for
earlier sums; and a vector for each row whose sum is its total."""
_FOUR = 4
"""Vectors of a row: one panel's keys."""


def _to_weights(_: Any, _scores: Any, _step: Any, _state: Any, _scale: Any, _coming: Any) -> Any:
    """Replaces the scores of 16 rows, with a row stride in bytes, by 2^(score · scale − base) as bfloat16, in the first
    half of each row. They are added to the rows' totals before rounding.

    A base is the highest score so far. Returns whether any was raised; if so, earlier sums have to be multiplied with
    the factors of the state. −inf gives 0, NaN stays NaN. `coming` are (address, lines): cache lines to prefetch from
    there for each row.
    """
    pair = types.UniTuple(types.intp, 2)

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        scores, step, state, scale, coming = given
        scale = spread(builder, scale)
        address, lines = cgutils.unpack_tuple(builder, coming)
        room = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(VECTOR, ROWS)), WORD)
        rows = [_vectors(builder, at(builder, scores, WORD(row), step)) for row in range(ROWS)]
        highs = builder.fmul(_sixteen(builder, [_joined(builder, _highest, row) for row in rows], _highest), scale)
        raised = _raise_bases(builder, state, highs, room)
        with cgutils.for_range(builder, WORD(ROWS)) as loop:
            row = at(builder, scores, loop.index, step)
            base = spread(builder, load(builder, at(builder, room, loop.index, WORD(FLOAT)), SINGLE))
            less = builder.fneg(base)
            scaled = (multiply_add(builder, number, scale, less) for number in _vectors(builder, row))
            powers = [short_power_of_two(builder, number) for number in scaled]
            for index in range(0, _FOUR, 2):
                store(builder, both_rounded(builder, *powers[index : index + 2]), plus(builder, row, LINE * index // 2))
            total = at(builder, state, loop.index, WORD(LINE), 2 * LINE)
            factor = spread(builder, load(builder, at(builder, state, loop.index, WORD(FLOAT), LINE), SINGLE))
            known = load(builder, total, VECTOR)
            store(builder, multiply_add(builder, known, factor, _joined(builder, _sum, powers)), total)
            begin = builder.mul(loop.index, lines)
            with cgutils.for_range(builder, lines) as line:
                ask(builder, at(builder, address, builder.add(begin, line.index), WORD(LINE)))
        return raised

    return types.boolean(types.intp, types.intp, types.intp, types.float32, pair), generate


def _vectors(builder: Any, row: Value) -> list[Value]:
    return [load(builder, plus(builder, row, LINE * index), VECTOR) for index in range(_FOUR)]


def _highest(builder: Any, one: Value, other: Value) -> Value:
    return higher(builder, one, other)


def _sum(builder: Any, one: Value, other: Value) -> Value:
    return builder.fadd(one, other)


def _joined(builder: Any, join: Any, parts: Sequence[Value]) -> Value:
    """One vector of four."""
    first, second, third, last = parts
    return join(builder, join(builder, first, second), join(builder, third, last))


def _sixteen(builder: Any, rows: Sequence[Value], join: Any) -> Value:
    """A vector with, for each of 16 vectors, the reduction of its lanes."""
    known, width = list(rows), LANES
    while len(known) > 1:
        pairs = zip(known[::2], known[1::2], strict=True)
        first = [lane for begin in range(0, 2 * LANES, width) for lane in range(begin, begin + width // 2)]
        halves = places(first), places([lane + width // 2 for lane in first])
        known = [join(builder, *(builder.shuffle_vector(*pair, half) for half in halves)) for pair in pairs]
        width //= 2
    return known[0]


def _raise_bases(builder: Any, state: Value, highs: Value, room: Value) -> Value:
    """Raises bases, sets factors, and writes to `room` what to subtract from scores: 0 where nothing was seen yet.
    Returns whether any was raised."""
    bases = load(builder, state, VECTOR)
    up = builder.fcmp_ordered(">", highs, bases)
    raised = builder.select(up, highs, bases)
    store(builder, raised, state)
    factors = builder.select(up, power_of_two(builder, builder.fsub(bases, raised)), constant(1.0))
    store(builder, factors, plus(builder, state, LINE))
    seen = builder.fcmp_ordered(">", raised, constant(-np.inf))
    store(builder, builder.select(seen, raised, constant(0.0)), room)
    return builder.icmp_unsigned("!=", builder.bitcast(up, ir.IntType(LANES)), ir.IntType(LANES)(0))


def _begin_state(_: Any, _state: Any) -> Any:
    """Sets a state to that of rows that have seen nothing."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        store(builder, constant(-np.inf), given[0])
        for vector in range(1, STATE // LANES):
            store(builder, constant(0.0), plus(builder, given[0], LINE * vector))
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _write_shares(_: Any, _state: Any) -> Any:
    """Sets the state's factors to 1 / total for each row, for the final scaling."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        totals = [load(builder, plus(builder, given[0], LINE * (2 + row)), VECTOR) for row in range(ROWS)]
        shares = builder.fdiv(constant(1.0), _sixteen(builder, totals, _sum))
        store(builder, shares, plus(builder, given[0], LINE))
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _scale_rows(_: Any, _place: Any, _step: Any, _vectors: Any, _state: Any) -> Any:
    """Multiplies 16 rows of `vectors` vectors, with a row stride in bytes, with the factors of a state."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        place, step, vectors, state = given
        with cgutils.for_range(builder, WORD(ROWS)) as loop:
            row = at(builder, place, loop.index, step)
            factor = spread(builder, load(builder, at(builder, state, loop.index, WORD(FLOAT), LINE), SINGLE))
            with cgutils.for_range(builder, vectors) as line:
                here = at(builder, row, line.index, WORD(LINE))
                store(builder, builder.fmul(load(builder, here, VECTOR), factor), here)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


begin_state: Any = intrinsic(_begin_state)
to_weights: Any = intrinsic(_to_weights)
write_shares: Any = intrinsic(_write_shares)
scale_rows: Any = intrinsic(_scale_rows)
