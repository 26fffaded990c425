"""Attention's products with bfloat16 keys and values, read in the layout of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    FLAG,
    FLOAT,
    LANES,
    LINE,
    SINGLE,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    ask,
    at,
    both_halves,
    constant,
    declared,
    flags,
    load,
    multiply_add,
    plus,
    pointer,
    spread,
    spread_whole,
    store,
    totals,
)

_TOGETHER = 8
"""Keys or values that are worked at side by side."""


def _score_keys(_: Any, rows: Any, _places: Any, _last: Any, _words: Any) -> Any:
    """Products of `rows` queries, a literal, with eight bfloat16 keys at each of `_TOGETHER` positions from an address
    on; positions behind `last` repeat it.

    `places` are (address of scores, bytes from one query's to the next's, address of queries, bytes from one to the
    next, address of keys, bytes from one to the next, address of the next keys). A key has `words` words of two
    numbers; a query is float32, for each 16 words the 16 first numbers, then the 16 second ones, padded with zeros.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    signature, many = types.void(rows, types.UniTuple(types.intp, 7), types.intp, types.intp), rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        scores, apart, queries, further, keys, step, coming = cgutils.unpack_tuple(builder, given[1])
        places = [_clamped_place(builder, keys, place, given[2], step) for place in range(_TOGETHER)]
        sums = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_TOGETHER)] for _ in range(many)]
        with _over_words(builder, given[3]) as (vector, mask):
            parts = [
                [
                    load(
                        builder,
                        at(builder, at(builder, queries, WORD(row), further), vector, WORD(2 * LINE), more),
                        VECTOR,
                    )
                    for more in (0, LINE)
                ]
                for row in range(many)
            ]
            for index, place in enumerate(places):
                ask(builder, at(builder, at(builder, coming, WORD(index), step), vector, WORD(LINE)))
                key = both_halves(builder, _load_words(builder, at(builder, place, vector, WORD(LINE)), mask))
                for row in range(many):
                    total = builder.load(sums[row][index])
                    for part, half in zip(parts[row], key, strict=True):
                        total = multiply_add(builder, part, half, total)
                    builder.store(total, sums[row][index])
        for row in range(many):
            found = totals(builder, [builder.load(total) for total in sums[row]])
            place = at(builder, scores, WORD(row), apart)
            builder.store(found, pointer(builder, place, found.type)).align = FLOAT
        return context.get_dummy_value()

    return signature, generate


def _add_values(_: Any, rows: Any, _places: Any, _last: Any, _words: Any) -> Any:
    """Adds eight bfloat16 values, each times its weight, to the sums of `rows` queries, a literal. Values are addressed
    as keys are by `score_keys`; those behind position `last` must have weight 0.

    `places` are (address of weights, bytes from one query's to the next's, address of sums, bytes from one to the next,
    address of values, bytes from one to the next, address of the next values). Sums have the layout of queries.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    signature, many = types.void(rows, types.UniTuple(types.intp, 7), types.intp, types.intp), rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        weights, apart, sums, further, values, step, coming = cgutils.unpack_tuple(builder, given[1])
        places = [_clamped_place(builder, values, place, given[2], step) for place in range(_TOGETHER)]
        shares = [
            [
                spread(builder, load(builder, at(builder, weights, WORD(row), apart, FLOAT * place), SINGLE))
                for place in range(_TOGETHER)
            ]
            for row in range(many)
        ]
        with _over_words(builder, given[3]) as (vector, mask):
            ends = [
                [at(builder, at(builder, sums, WORD(row), further), vector, WORD(2 * LINE), more) for more in (0, LINE)]
                for row in range(many)
            ]
            totals = [[[load(builder, end, VECTOR), None] for end in both] for both in ends]
            for index, place in enumerate(places):
                ask(builder, at(builder, at(builder, coming, WORD(index), step), vector, WORD(LINE)))
                value = both_halves(builder, _load_words(builder, at(builder, place, vector, WORD(LINE)), mask))
                for row in range(many):
                    for total, half in zip(totals[row], value, strict=True):
                        chain = index % 2  # a sum waits for the one before it
                        known = total[chain]
                        share = shares[row][index]
                        total[chain] = (
                            builder.fmul(share, half) if known is None else multiply_add(builder, share, half, known)
                        )
            for row in range(many):
                for total, end in zip(totals[row], ends[row], strict=True):
                    store(builder, builder.fadd(*total), end)
        return context.get_dummy_value()

    return signature, generate


def _clamped_place(builder: Any, base: Value, place: int, last: Value, step: Value) -> Value:
    """The address of a place, or of the last one if that is before it."""
    index = builder.select(builder.icmp_signed("<", last, WORD(place)), last, WORD(place))
    return at(builder, base, index, step)


@contextmanager
def _over_words(builder: Any, words: Value) -> Iterator[tuple[Value, Value]]:
    """A loop over vectors of 16 words, the last of which may be partial: its index, and a mask of its words."""
    lanes = ir.Constant(WHOLE, list(range(LANES)))
    vectors = builder.sdiv(plus(builder, words, LANES - 1), WORD(LANES))
    with cgutils.for_range(builder, vectors) as loop:
        left = builder.sub(words, builder.mul(loop.index, WORD(LANES)))
        yield loop.index, builder.icmp_signed("<", lanes, spread_whole(builder, builder.trunc(left, FLAG)))


def _load_words(builder: Any, address: Value, mask: Value) -> Value:
    """Loads 16 words; those outside of the mask are zero and are not read."""
    kinds = [WHOLE.as_pointer(), FLAG, ir.VectorType(ir.IntType(1), LANES), WHOLE]
    load = declared(builder, "llvm.masked.load.v16i32.p0", WHOLE, kinds)
    return builder.call(load, [pointer(builder, address, WHOLE), FLAG(2), mask, flags(0)])


score_keys: Any = intrinsic(_score_keys)
add_values: Any = intrinsic(_add_values)
