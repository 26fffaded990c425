"""Products of rows with weights as they are stored, summed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    FLAG,
    FLOAT,
    LINE,
    SINGLE,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    add_pairs,
    add_quads,
    ask,
    at,
    constant,
    load,
    load_half_lines,
    load_vector,
    multiply_add,
    plus,
    spread,
    spread_whole,
    store,
    store_half_lines,
)
from common.cpu.vectors.stored import HALF_LINES, QUADS, Paired, kind_of, stored_bytes, widened_line

NOTHING, ROWS = 0, -1
"""What a product prefetches: nothing, or the next rows of out and x (all of them, if rows are adjacent and inputs are
as many as outputs). A number above 0 is for the next weights: by how many products their prefetch is shared."""

_TURN = 4
"""Inputs per turn of a product's loop, which itself costs instructions."""


class _Shape(NamedTuple):
    """The literals of `add_products`."""

    rows: int
    vectors: int
    across: int
    ahead: int


def _add_products(
    _: Any, rows: Any, vectors: Any, across: Any, ahead: Any, stored: Any, _places: Any, _count: Any
) -> Any:
    """For each of `rows` rows: out[0:w] += Σ over `count` > 0 inputs of x[input] · weights[input, 0:w].

    x is float32; if weights are pairs of inputs, x is pairs of bfloat16 as well, and their products are added one after
    the other, each sum rounded to float32 (AVX512-BF16's VDPBF16PS). w is 16 · `vectors`, or that of `HALF_LINES`; the
    weights of one input are 16 · `across`, of which these are a part. `rows` and `vectors` are literals whose product
    is at most 24 (6 without AVX-512), since sums stay in registers. `stored` is an array of the weights' dtype, as
    `kind_of` takes it. `places` are (address of out, bytes from one row of it to the next, the same of x, address of
    weights, address of the next weights, bytes of them to prefetch with each input). `ahead`, a literal, says what is
    prefetched.
    """
    literals = (rows, vectors, across, ahead)
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None  # numba asks again once it knows the constants
    signature = types.void(*literals, stored, types.UniTuple(types.intp, 7), types.intp)
    shape, kind = _Shape(*(literal.literal_value for literal in literals)), kind_of(stored)

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        _write_products(builder, shape, kind, cgutils.unpack_tuple(builder, given[5]), given[6])
        return context.get_dummy_value()

    return signature, generate


def _write_products(builder: Any, shape: _Shape, kind: Any, places: Sequence[Value], count: Value) -> None:
    """A loop over all inputs. If no weights are prefetched, each turn takes several inputs, and a second loop takes the
    rest."""
    if shape.vectors == HALF_LINES and kind != types.uint32:
        return  # is compiled, and never called
    if shape.ahead > NOTHING:
        _write_turns(builder, shape, kind, places, count, 1)
        return
    out, out_step, x, x_step, weights, coming, coming_step = places
    turns = builder.sdiv(count, WORD(_TURN))
    done = builder.mul(turns, WORD(_TURN))
    left = builder.sub(count, done)
    with builder.if_then(builder.icmp_signed(">", turns, WORD(0))):
        _write_turns(builder, shape, kind, places, turns, _TURN)
    with builder.if_then(builder.icmp_signed(">", left, WORD(0))):
        x = at(builder, x, done, WORD(FLOAT))
        weights = at(builder, weights, done, WORD(stored_bytes(kind, shape.across)))
        coming = at(builder, coming, done, coming_step)
        rest = (out, out_step, x, x_step, weights, coming, coming_step)
        _write_turns(builder, shape, kind, rest, left, 1)


def _write_turns(builder: Any, shape: _Shape, kind: Any, places: Sequence[Value], turns: Value, inputs: int) -> None:
    """The loop over `turns` turns of `inputs` inputs each, with the sums of all rows in registers."""
    (rows, vectors, across, ahead), (out, out_step, x, x_step, weights, coming, coming_step) = shape, places
    parts, size = range(max(1, vectors)), stored_bytes(kind, across)
    read, write = (load_half_lines, store_half_lines) if vectors == HALF_LINES else (load_vector, store)
    ends = [[at(builder, out, WORD(row), out_step, LINE * part) for part in parts] for row in range(rows)]
    before, begin = builder.block, [[read(builder, end) for end in row] for row in ends]
    loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    turn = builder.phi(WORD)
    sums = [[builder.phi(VECTOR) for _ in parts] for _ in range(rows)]
    totals = sums
    first = builder.mul(turn, WORD(inputs))
    for step in range(inputs):
        index = plus(builder, first, step)
        weight = widened_line(builder, kind, at(builder, weights, first, WORD(size), size * step), vectors)
        if ahead > NOTHING:
            for line in range(max(1, size // (LINE * ahead))):
                ask(builder, at(builder, coming, index, coming_step, LINE * line))
        if ahead == ROWS and step % 2 == 0:  # every other time is enough for all lines
            for base, apart in ((out, out_step), (x, x_step)):
                following = at(builder, base, WORD(rows), apart)
                ask(builder, at(builder, following, index, WORD(rows * FLOAT)))
        nexts = []
        for row in range(rows):
            place = at(builder, at(builder, x, WORD(row), x_step), first, WORD(FLOAT), FLOAT * step)
            nexts.append(_added(builder, kind, place, weight, totals[row]))
        totals = nexts
    following = builder.add(turn, WORD(1))
    turn.add_incoming(WORD(0), before)
    turn.add_incoming(following, loop)
    for row in range(rows):
        for part in parts:
            sums[row][part].add_incoming(begin[row][part], before)
            sums[row][part].add_incoming(totals[row][part], loop)
    builder.cbranch(builder.icmp_signed("<", following, turns), loop, after)

    builder.position_at_end(after)
    for row in range(rows):
        for part in parts:
            write(builder, totals[row][part], ends[row][part])


def _added(builder: Any, kind: Any, place: Value, weight: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
    """Sums plus the products of one input, whose number is at an address."""
    if kind == QUADS:
        four = spread_whole(builder, load(builder, place, FLAG))
        return [add_quads(builder, total, part, four) for total, part in zip(totals, weight, strict=True)]
    if kind == types.uint64 or isinstance(kind, Paired):
        both = spread_whole(builder, load(builder, place, FLAG))
        return [add_pairs(builder, total, both, part) for total, part in zip(totals, weight, strict=True)]
    number = spread(builder, load(builder, place, SINGLE))
    return [multiply_add(builder, number, part, total) for total, part in zip(totals, weight, strict=True)]


def _in_pairs(_: Any, stored: Any) -> Any:
    """Whether an array holds bfloat16 weights of two outputs per word; known at compile time."""

    def generate(_context: Any, _builder: Any, _signature: Any, _given: Any) -> Value:
        return ir.IntType(1)(stored.dtype == types.uint32)

    return types.boolean(stored), generate


def _widened_stretch(_: Any, vectors: Any, stored: Any, _wide: Any, _weights: Any, _count: Any) -> Any:
    """Converts stored weights, 16 · `vectors` for each of `count` inputs, to float32, or, if `Paired`, each two inputs
    of them to words of two bfloat16. It writes to an address, and returns the address at which the result lies."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.intp(vectors, stored, types.intp, types.intp, types.intp)
    many, kind = vectors.literal_value, kind_of(stored)

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        _, _, wide, weights, count = given
        if kind == types.float32:
            return weights
        with cgutils.for_range(builder, count) as loop:
            place = at(builder, weights, loop.index, WORD(stored_bytes(kind, many)))
            for part, number in enumerate(widened_line(builder, kind, place, many)):
                to = at(builder, wide, loop.index, WORD(LINE * many), LINE * part)
                store(builder, builder.bitcast(number, VECTOR), to)
        return wide

    return signature, generate


def _scaled_stretch(
    _: Any, vectors: Any, together: Any, stored: Any, _places: Any, _constants: Any, _count: Any
) -> Any:
    """(number − zero) · scale for stored numbers, 16 · `vectors` for each of `count` inputs. `places` are (address of
    float32, bytes from some vectors of it to the next, address of the numbers); `together` vectors are adjacent for
    each input. `constants` are the addresses of float32 scales and zeros, one for each output."""
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (vectors, together)):
        return None
    pair = types.UniTuple(types.intp, 2)
    signature = types.void(vectors, together, stored, types.UniTuple(types.intp, 3), pair, types.intp)
    many, few, kind = vectors.literal_value, together.literal_value, stored.dtype

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        wide, apart, numbers = cgutils.unpack_tuple(builder, given[3])
        bases = cgutils.unpack_tuple(builder, given[4])
        scales, zeros = (
            [load(builder, plus(builder, base, LINE * part), VECTOR) for part in range(many)] for base in bases
        )
        with cgutils.for_range(builder, given[5]) as loop:
            place = at(builder, numbers, loop.index, WORD(stored_bytes(kind, many)))
            for part, number in enumerate(widened_line(builder, kind, place, many)):
                scaled = builder.fmul(builder.fsub(number, zeros[part]), scales[part])
                tile = at(builder, wide, WORD(part // few), apart, LINE * (part % few))
                store(builder, scaled, at(builder, tile, loop.index, WORD(LINE * few)))
        return context.get_dummy_value()

    return signature, generate


def _add_scaled(_: Any, vectors: Any, _places: Any, _apart: Any, _of_x: Any) -> Any:
    """total += (part − zero · of_x) · scale and part = 0, for 16 · `vectors` numbers each. `places` are the addresses
    of totals, parts, scales and zeros; the first two are offset by `apart` bytes."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.void(vectors, types.UniTuple(types.intp, 4), types.intp, types.float32)
    many = vectors.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        totals, parts, scales, zeros = cgutils.unpack_tuple(builder, given[1])
        less = spread(builder, builder.fneg(given[3]))
        for line in range(0, LINE * many, LINE):
            total, part = (at(builder, base, given[2], WORD(1), line) for base in (totals, parts))
            scale, zero = (load(builder, plus(builder, base, line), VECTOR) for base in (scales, zeros))
            without = multiply_add(builder, less, zero, load(builder, part, VECTOR))
            store(builder, multiply_add(builder, without, scale, load(builder, total, VECTOR)), total)
            store(builder, constant(0.0), part)
        return context.get_dummy_value()

    return signature, generate


def _write_whole_sums(_: Any, vectors: Any, _places: Any, _more: Any, _factor: Any) -> Any:
    """out = (sums + more) · (scale · factor) + bias, for int32 sums of 16 · `vectors` numbers: the first sum is exact,
    the rest is rounded. `places` as in `write_sums`."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.void(vectors, types.UniTuple(types.intp, 4), types.int32, types.float32)
    many = vectors.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, sums, scales, biases = cgutils.unpack_tuple(builder, given[1])
        more, factor = spread_whole(builder, given[2]), spread(builder, given[3])
        for line in range(0, LINE * many, LINE):
            scale, bias = (load(builder, plus(builder, base, line), VECTOR) for base in (scales, biases))
            whole = builder.add(load(builder, plus(builder, sums, line), WHOLE), more)
            number = builder.sitofp(whole, VECTOR)
            total = multiply_add(builder, number, builder.fmul(scale, factor), bias)
            store(builder, total, plus(builder, out, line))
        return context.get_dummy_value()

    return signature, generate


def _write_sums(_: Any, vectors: Any, _places: Any) -> Any:
    """out = sums · scale + bias, rounded once, of 16 · `vectors` numbers. `places` are the addresses of out, sums,
    scale and bias."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.void(vectors, types.UniTuple(types.intp, 4))
    many = vectors.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, *others = cgutils.unpack_tuple(builder, given[1])
        for line in range(0, LINE * many, LINE):
            parts = [load(builder, plus(builder, base, line), VECTOR) for base in others]
            store(builder, multiply_add(builder, *parts), plus(builder, out, line))
        return context.get_dummy_value()

    return signature, generate


add_products: Any = intrinsic(_add_products)
write_sums: Any = intrinsic(_write_sums)
write_whole_sums: Any = intrinsic(_write_whole_sums)
in_pairs: Any = intrinsic(_in_pairs)
widened_stretch: Any = intrinsic(_widened_stretch)
scaled_stretch: Any = intrinsic(_scaled_stretch)
add_scaled: Any = intrinsic(_add_scaled)
