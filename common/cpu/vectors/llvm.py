"""Building blocks of the loops in this package: types, addresses, loads and stores, sums and products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
FLOAT = 4
"""Bytes."""
LINE = LANES * FLOAT
"""Bytes of a vector, and of a line of a cache."""

Value = Any
"""A value of LLVM's, as its builder gives them."""

WORD, FLAG, SINGLE, BYTE = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(8)
VECTOR, WHOLE = ir.VectorType(SINGLE, LANES), ir.VectorType(FLAG, LANES)
HALVES, BYTES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(BYTE, LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)
HALF_VECTOR, HALF_WHOLE = ir.VectorType(SINGLE, LANES // 2), ir.VectorType(FLAG, LANES // 2)


def totals(builder: Any, vectors: Sequence[Value]) -> Value:
    """The sums over each of eight vectors: in turns two half sums of two vectors become one vector."""
    known, width = list(vectors), LANES
    while width > 1:
        half = width // 2
        first = [lane for begin in range(0, 2 * LANES, width) for lane in range(begin, begin + half)]
        others = [lane + half for lane in first]
        if len(known) > 1:
            pairs = list(zip(known[::2], known[1::2], strict=True))
        else:
            pairs = [(known[0], known[0])]
            first, others = (lanes[: LANES // 2] for lanes in (first, others))
        known = [
            builder.fadd(*(builder.shuffle_vector(one, other, places(lanes)) for lanes in (first, others)))
            for one, other in pairs
        ]
        width = half
    return known[0]


def places(numbers: Sequence[int]) -> Value:
    """Places of numbers in two vectors, as a shuffle takes them."""
    return ir.Constant(ir.VectorType(FLAG, len(numbers)), list(numbers))


def at(builder: Any, base: Value, index: Value, step: Value, more: int = 0) -> Value:
    """The address of number `index` from a base on, `step` bytes each, plus `more` bytes."""
    return plus(builder, builder.add(base, builder.mul(index, step)), more)


def pointer(builder: Any, address: Value, kind: Any) -> Value:
    """An address as that of a type."""
    return builder.inttoptr(address, kind.as_pointer())


def plus(builder: Any, base: Value, more: int) -> Value:
    """An address `more` bytes on."""
    return builder.add(base, WORD(more))


def ask(builder: Any, address: Value) -> None:
    """Has the line at an address fetched: to read, often, as data."""
    prefetch = declared(builder, "llvm.prefetch.p0", ir.VoidType(), [BYTE.as_pointer(), FLAG, FLAG, FLAG])
    builder.call(prefetch, [pointer(builder, address, BYTE), FLAG(0), FLAG(3), FLAG(1)])


def load(builder: Any, address: Value, kind: Any, *, size: int = FLOAT) -> Value:
    """Loads a value whose numbers have `size` bytes each."""
    value = builder.load(pointer(builder, address, kind))
    value.align = size
    return value


def store(builder: Any, value: Value, address: Value) -> None:
    """Stores a vector at an address, which need not be aligned."""
    builder.store(value, pointer(builder, address, VECTOR)).align = FLOAT


def load_vector(builder: Any, address: Value) -> Value:
    """The vector at an address."""
    return load(builder, address, VECTOR)


def load_half_lines(builder: Any, address: Value) -> Value:
    """A vector of `HALF_LINES`."""
    halves = (load(builder, plus(builder, address, LINE * half), HALF_VECTOR) for half in range(2))
    return joined(builder, *halves)


def store_half_lines(builder: Any, value: Value, address: Value) -> None:
    """Stores what `load_half_lines` loads."""
    for half in range(2):
        lanes = places(range(half * LANES // 2, (half + 1) * LANES // 2))
        part = builder.shuffle_vector(value, value, lanes)
        place = pointer(builder, plus(builder, address, LINE * half), HALF_VECTOR)
        builder.store(part, place).align = FLOAT


def joined(builder: Any, first: Value, second: Value) -> Value:
    """One vector of two of half its length."""
    return builder.shuffle_vector(first, second, places(range(LANES)))


def constant(number: float) -> Value:
    """A vector of one number."""
    return ir.Constant(VECTOR, [number] * LANES)


def flags(number: int) -> Value:
    """16 equal whole numbers of 32 bits."""
    return ir.Constant(WHOLE, [number] * LANES)


def shorts(number: int) -> Value:
    """The same of 16 bits."""
    return ir.Constant(SHORTS, [number] * LANES)


def spread(builder: Any, number: Value) -> Value:
    """The same of a number that is known when the kernel runs."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, FLAG(0))
    return builder.shuffle_vector(first, undefined, flags(0))


def spread_whole(builder: Any, number: Value) -> Value:
    """The same of a whole number."""
    undefined = ir.Constant(WHOLE, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, FLAG(0)), undefined, flags(0))


def add_pairs(builder: Any, total: Value, one: Value, other: Value) -> Value:
    """total + the products of bfloat16 pairs. LLVM takes words for its own bfloat16 type, which llvmlite does not
    name."""
    product = declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [VECTOR, WHOLE, WHOLE])
    return builder.call(product, [total, one, other])


def add_quads(builder: Any, total: Value, unsigned: Value, signed: Value) -> Value:
    """total + the products of quads of 8-bit integers, one vector unsigned, the other signed. Totals are int32, kept in
    the bits of float32."""
    product = declared(builder, "llvm.x86.avx512.vpdpbusd.512", WHOLE, [WHOLE] * 3)
    return builder.bitcast(builder.call(product, [builder.bitcast(total, WHOLE), unsigned, signed]), VECTOR)


def share(builder: Any) -> None:
    """Keeps the function that is being written from being inlined: inlined, a compiler might fuse a product and a sum
    in one kernel and not in another."""
    builder.function.attributes.add("noinline")


def multiply_add(builder: Any, one: Value, other: Value, more: Value) -> Value:
    """one · other + more, rounded once."""
    return builder.call(declared(builder, "llvm.fma.v16f32", VECTOR, [VECTOR] * 3), [one, other, more])


def higher(builder: Any, one: Value, other: Value) -> Value:
    """The elementwise maximum; `other` where `one` is NaN."""
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def both_halves(builder: Any, words: Value) -> tuple[Value, Value]:
    """The lower and the upper bfloat16 of words, as float32."""
    halves = builder.shl(words, flags(16)), builder.and_(words, flags(0xFFFF0000))
    return builder.bitcast(halves[0], VECTOR), builder.bitcast(halves[1], VECTOR)


def declared(builder: Any, name: str, result: Any, arguments: Any) -> Value:
    """A function of LLVM's, by its name and types."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
