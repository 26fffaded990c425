"""Numbers as weights and caches store them, and float32 of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    BYTES,
    FLAG,
    HALF_VECTOR,
    HALF_WHOLE,
    HALVES,
    LANES,
    LINE,
    SHORTS,
    SINGLE,
    VECTOR,
    WHOLE,
    Value,
    flags,
    joined,
    load,
    plus,
    shorts,
)

HALF_LINES = 0
"""Instead of a number of vectors: one vector whose halves lie a line apart, as the bfloat16 of eight adjacent words do.
Sixteen registers of eight numbers hold its sums for six rows."""

_BITS = {
    types.float32: 32,
    types.uint64: 32,
    types.uint32: 16,
    types.uint16: 16,
    types.int16: 16,
    types.int8: 8,
    types.uint8: 8,
    types.int32: 4,
    types.int64: 4,
}
"""Bits of a number, by the dtype of its array: float32; bfloat16 of two inputs, which count as one input (see
`PairPanels`); bfloat16 of two outputs (see `PanelWeight`); float16; bfloat16; int8; e4m3, widened to 2⁻⁸ times its
value; and two to a byte (see `QuantizedPanels`) integers from 0 to 15, and e2m1, widened to 2⁻¹⁴ times its value."""


class Paired(NamedTuple):
    """8-bit or 4-bit numbers that bfloat16 can hold: two inputs of an output are multiplied at once, as those of
    `types.uint64` are. Each is stored as the type given here."""

    kind: Any


QUADS = "quads"
"""Instead of a type: unsigned 8-bit numbers of four adjacent inputs, which count as one input (see `QuadPanels`). Rows
are signed; sums are int32, kept in the bits of float32."""


def kind_of(stored: Any) -> Any:
    """The storage format of weights: given the type of their array, that; given a tuple of the array, `Paired`; given a
    tuple of four, `QUADS`."""
    if not isinstance(stored, types.UniTuple):
        return stored.dtype
    return QUADS if stored.count == 4 else Paired(stored.dtype.dtype)


def stored_bytes(kind: Any, vectors: int) -> int:
    """Bytes of the weights of one input, or of the inputs that are multiplied at once."""
    if isinstance(kind, Paired):
        return 2 * stored_bytes(kind.kind, vectors)
    return LINE * vectors if kind == QUADS else LANES * vectors * _BITS[kind] // 8


def widened_line(builder: Any, kind: Any, place: Value, vectors: int) -> list[Value]:
    """The weights of one input, loaded from an address: as float32 vectors, or, for pairs of inputs, as they are."""
    if isinstance(kind, Paired):
        size = stored_bytes(kind.kind, vectors)
        two = (widened_line(builder, kind.kind, plus(builder, place, size * which), vectors) for which in (0, 1))
        return [_word(builder, *pair) for pair in zip(*two, strict=True)]
    if vectors == HALF_LINES:
        words = load(builder, place, HALF_WHOLE)
        shift, mask = (ir.Constant(HALF_WHOLE, [number] * (LANES // 2)) for number in (16, 0xFFFF0000))
        both = builder.shl(words, shift), builder.and_(words, mask)
        return [joined(builder, *(builder.bitcast(half, HALF_VECTOR) for half in both))]
    if kind == types.uint32:  # of two numbers side by side, bfloat16 is the upper half of a float32 each
        pairs = [load(builder, plus(builder, place, LINE * line), WHOLE) for line in range(vectors // 2)]
        halves = [(builder.shl(pair, flags(16)), builder.and_(pair, flags(0xFFFF0000))) for pair in pairs]
        return [builder.bitcast(half, VECTOR) for both in halves for half in both]
    size = stored_bytes(kind, 1)
    places = [plus(builder, place, size * part) for part in range(vectors)]
    if kind in (types.uint64, QUADS):  # multiplied as they are
        return [load(builder, each, WHOLE) for each in places]
    if kind == types.uint16:
        return [builder.fpext(load(builder, each, HALVES, size=2), VECTOR) for each in places]
    if kind == types.int8:
        return [builder.sitofp(builder.sext(load(builder, each, BYTES, size=1), WHOLE), VECTOR) for each in places]
    if kind == types.int16:
        numbers = [builder.zext(load(builder, each, SHORTS, size=2), WHOLE) for each in places]
        return [builder.bitcast(builder.shl(number, flags(16)), VECTOR) for number in numbers]
    if kind == types.uint8:  # sign, 4 bits of exponent, 3 of mantissa: in a half, whose exponent has 5, less by 8
        signed = [builder.sext(load(builder, each, BYTES, size=1), SHORTS) for each in places]
        return [_half(builder, builder.shl(each, shorts(7)), 0xBF80) for each in signed]
    if kind in (types.int32, types.int64):
        lines = [load(builder, plus(builder, place, LANES * line), BYTES, size=1) for line in range(vectors // 2)]
        widen = _nibbles if kind == types.int32 else _shortest_floats
        return [number for line in lines for number in widen(builder, line)]
    return [load(builder, each, VECTOR) for each in places]


def _word(builder: Any, low: Value, high: Value) -> Value:
    """Pairs of bfloat16, from two float32 vectors whose lower halves are 0."""
    lower, upper = (builder.bitcast(number, WHOLE) for number in (low, high))
    return builder.or_(builder.lshr(lower, flags(16)), upper)


def _nibbles(builder: Any, line: Value) -> tuple[Value, Value]:
    """The lower and the upper halves of bytes, as float32."""
    wide = builder.zext(line, WHOLE)
    low, high = builder.and_(wide, flags(15)), builder.lshr(wide, flags(4))
    return builder.sitofp(low, VECTOR), builder.sitofp(high, VECTOR)


def _shortest_floats(builder: Any, line: Value) -> tuple[Value, Value]:
    """The same of e2m1, as float32: sign, 2 bits of exponent, 1 of mantissa stand in a half at the places of its sign,
    the end of its exponent and the begin of its mantissa, so that its exponent is less by 14."""
    wide = builder.sext(line, SHORTS)
    low = builder.ashr(builder.shl(wide, shorts(12)), shorts(3))
    return _half(builder, low, 0x8E00), _half(builder, builder.shl(wide, shorts(5)), 0x8E00)


def _half(builder: Any, bits: Value, mask: int) -> Value:
    """The masked bits of 16-bit integers, read as float16."""
    return builder.fpext(builder.bitcast(builder.and_(bits, shorts(mask)), HALVES), VECTOR)


def _lower_number(_: Any, word: Any) -> Any:
    """The float32 of the bfloat16 that is the lower half of a word, uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.bitcast(builder.shl(given[0], FLAG(16)), SINGLE)

    return types.float32(word), generate


def _upper_number(_: Any, word: Any) -> Any:
    """The same of the upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.bitcast(builder.and_(given[0], FLAG(0xFFFF0000)), SINGLE)

    return types.float32(word), generate


lower_half: Any = intrinsic(_lower_number)
upper_half: Any = intrinsic(_upper_number)


@numba.njit(inline="always")
def rounded(bits: Any) -> Any:
    """The bits of float32, uint32, rounded so that the upper 16 are the nearest bfloat16, halves to even. NaN stays
    NaN."""
    near = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.uint32(near if bits & np.uint32(0x7FFFFFFF) <= np.uint32(0x7F800000) else bits | np.uint32(0x400000))
