"""Inner loops over vectors of 16 float32, written in LLVM's own terms for numba's kernels.

numba has no vectors that stay in registers over a loop, and its compiler takes half of the width that a processor has.
What uses these is compiled with `made_of`, so that its compiled form on disk notices changes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
FLOAT = 4
"""Bytes."""
LINE = LANES * FLOAT
"""Bytes of a vector, and of a line of a cache."""
NOTHING, ROWS = 0, -1
"""What a product may ask of the memory while it computes: nothing, or the rows of out and x that come next (all of
them, where rows lie one behind the other, and there are as many inputs as outputs). A number above 0 is for the weights
that come next: by how many products they are asked for, of which this one does its part."""

HALF_LINES = 0
"""In place of a number of vectors: one whose halves lie a line apart, as the bfloat16 of eight words side by side do.
Sixteen registers of eight numbers hold the sums of six rows of it."""

Value = Any
"""A value of LLVM's, as its builder gives them."""

_WORD, _FLAG, _SINGLE, _BYTE = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(8)
_VECTOR, _WHOLE = ir.VectorType(_SINGLE, LANES), ir.VectorType(_FLAG, LANES)
_HALVES, _BYTES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(_BYTE, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_HALF_VECTOR, _HALF_WHOLE = ir.VectorType(_SINGLE, LANES // 2), ir.VectorType(_FLAG, LANES // 2)
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
"""Bits of a number, by the type of the array that has it: float32; bfloat16 of two inputs, side by side, which are one
input here (see `PairPanels`); bfloat16 of two outputs (see `PanelWeight`); float16; bfloat16; whole numbers of 8 bits;
e4m3, widened to 2⁻⁸ of itself; and in pairs (see `QuantizedPanels`) whole numbers from 0 to 15, and e2m1, widened to
2⁻¹⁴ of itself."""
_TURN = 4
"""Inputs of one turn of a product's loop, which costs instructions of its own."""
_FOUR = 4
"""Vectors that are worked at side by side, since a sum of two waits for the one before it."""
_TOGETHER = 8
"""Keys or values that are worked at side by side."""
_LEAST = -200.0
"""An exponent of two that gives 0 in float32."""
_BIAS, _INFINITE = 127.0, 128.0
"""Of the exponents of float32: what is added to them, and the first that is none of a number."""
_SCALES = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
"""Whether one instruction multiplies with powers of two, as AVX-512's does."""
_POWERS = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)
"""2^x between -½ and ½, interpolated at Chebyshev's points: less than 2 · 10⁻⁷ off."""


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

    x is float32; where weights are of two inputs each, x is two bfloat16 as well, and their products are added one
    after the other, each sum rounded to float32 (AVX512-BF16's VDPBF16PS).
    w is 16 · `vectors`, or those of `HALF_LINES`, and the weights of one input are 16 · `across`, of which these are a
    part. `rows` and `vectors` are literals, of which the product is at most 24 (6 without AVX-512), since the sums stay
    in registers. `stored` is an array of the type that the weights are stored in. `places` are (address of out, bytes
    from one row of it to the next, the same of x, address of weights, address of the weights that come next, bytes of
    them to ask for with each input). `ahead`, a literal, says what is asked of the memory meanwhile.
    """
    literals = (rows, vectors, across, ahead)
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None  # numba asks again, with what it knows of constants
    signature = types.void(*literals, stored, types.UniTuple(types.intp, 7), types.intp)
    shape, kind = _Shape(*(literal.literal_value for literal in literals)), stored.dtype

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        _write_products(builder, shape, kind, cgutils.unpack_tuple(builder, given[5]), given[6])
        return context.get_dummy_value()

    return signature, generate


def _write_products(builder: Any, shape: _Shape, kind: Any, places: Sequence[Value], count: Value) -> None:
    """A loop over all inputs; where no weights are waited for, its turns take several, and another loop the rest."""
    if shape.vectors == HALF_LINES and kind != types.uint32:
        return  # is compiled, and never called
    if shape.ahead > NOTHING:
        _write_turns(builder, shape, kind, places, count, 1)
        return
    out, out_step, x, x_step, weights, coming, coming_step = places
    turns = builder.sdiv(count, _WORD(_TURN))
    done = builder.mul(turns, _WORD(_TURN))
    left = builder.sub(count, done)
    with builder.if_then(builder.icmp_signed(">", turns, _WORD(0))):
        _write_turns(builder, shape, kind, places, turns, _TURN)
    with builder.if_then(builder.icmp_signed(">", left, _WORD(0))):
        x = _at(builder, x, done, _WORD(FLOAT))
        weights = _at(builder, weights, done, _WORD(_stored_bytes(kind, shape.across)))
        coming = _at(builder, coming, done, coming_step)
        rest = (out, out_step, x, x_step, weights, coming, coming_step)
        _write_turns(builder, shape, kind, rest, left, 1)


def _write_turns(builder: Any, shape: _Shape, kind: Any, places: Sequence[Value], turns: Value, inputs: int) -> None:
    """The loop over so many turns of so many inputs each, with the sums of all rows in registers."""
    (rows, vectors, across, ahead), (out, out_step, x, x_step, weights, coming, coming_step) = shape, places
    parts, size = range(max(1, vectors)), _stored_bytes(kind, across)
    load, store = (_load_half_lines, _store_half_lines) if vectors == HALF_LINES else (_load_vector, _store)
    ends = [[_at(builder, out, _WORD(row), out_step, LINE * part) for part in parts] for row in range(rows)]
    before, begin = builder.block, [[load(builder, end) for end in row] for row in ends]
    loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    turn = builder.phi(_WORD)
    sums = [[builder.phi(_VECTOR) for _ in parts] for _ in range(rows)]
    totals = sums
    first = builder.mul(turn, _WORD(inputs))
    for step in range(inputs):
        index = _plus(builder, first, step)
        weight = _widened(builder, kind, _at(builder, weights, first, _WORD(size), size * step), vectors)
        if ahead > NOTHING:
            for line in range(max(1, size // (LINE * ahead))):
                _ask(builder, _at(builder, coming, index, coming_step, LINE * line))
        if ahead == ROWS and step % 2 == 0:  # every other time is enough for all lines
            for base, apart in ((out, out_step), (x, x_step)):
                following = _at(builder, base, _WORD(rows), apart)
                _ask(builder, _at(builder, following, index, _WORD(rows * FLOAT)))
        nexts = []
        for row in range(rows):
            place = _at(builder, _at(builder, x, _WORD(row), x_step), first, _WORD(FLOAT), FLOAT * step)
            nexts.append(_added(builder, kind, place, weight, totals[row]))
        totals = nexts
    following = builder.add(turn, _WORD(1))
    turn.add_incoming(_WORD(0), before)
    turn.add_incoming(following, loop)
    for row in range(rows):
        for part in parts:
            sums[row][part].add_incoming(begin[row][part], before)
            sums[row][part].add_incoming(totals[row][part], loop)
    builder.cbranch(builder.icmp_signed("<", following, turns), loop, after)

    builder.position_at_end(after)
    for row in range(rows):
        for part in parts:
            store(builder, totals[row][part], ends[row][part])


def _added(builder: Any, kind: Any, place: Value, weight: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
    """Sums with the products of one input, whose number is at an address."""
    if kind == types.uint64:
        both = _spread_whole(builder, _load(builder, place, _FLAG))
        return [_add_pairs(builder, total, both, part) for total, part in zip(totals, weight, strict=True)]
    number = _spread(builder, _load(builder, place, _SINGLE))
    return [_multiply_add(builder, number, part, total) for total, part in zip(totals, weight, strict=True)]


def _widened_stretch(_: Any, vectors: Any, stored: Any, _wide: Any, _weights: Any, _count: Any) -> Any:
    """Makes float32 of weights as they are stored, 16 · `vectors` for each of `count` inputs: from one address to
    another, of which it gives back the one that has float32."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.intp(vectors, stored, types.intp, types.intp, types.intp)
    many, kind = vectors.literal_value, stored.dtype

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        _, _, wide, weights, count = given
        if kind == types.float32:
            return weights
        with cgutils.for_range(builder, count) as loop:
            place = _at(builder, weights, loop.index, _WORD(_stored_bytes(kind, many)))
            for part, number in enumerate(_widened(builder, kind, place, many)):
                _store(builder, number, _at(builder, wide, loop.index, _WORD(LINE * many), LINE * part))
        return wide

    return signature, generate


def _in_pairs(_: Any, stored: Any) -> Any:
    """Whether an array holds bfloat16 of two outputs each, which the compiler knows."""

    def generate(_context: Any, _builder: Any, _signature: Any, _given: Any) -> Value:
        return ir.IntType(1)(stored.dtype == types.uint32)

    return types.boolean(stored), generate


def _scaled_stretch(
    _: Any, vectors: Any, together: Any, stored: Any, _places: Any, _constants: Any, _count: Any
) -> Any:
    """Makes (number − zero) · scale of numbers as they are stored, 16 · `vectors` for each of `count` inputs. `places`
    are (address of float32, bytes from some vectors of it to the next, address of the numbers); `together` vectors lie
    side by side for each input. `constants` are the addresses of scales and zeros, float32, one for each output."""
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (vectors, together)):
        return None
    pair = types.UniTuple(types.intp, 2)
    signature = types.void(vectors, together, stored, types.UniTuple(types.intp, 3), pair, types.intp)
    many, few, kind = vectors.literal_value, together.literal_value, stored.dtype

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        wide, apart, numbers = cgutils.unpack_tuple(builder, given[3])
        bases = cgutils.unpack_tuple(builder, given[4])
        scales, zeros = (
            [_load(builder, _plus(builder, base, LINE * part), _VECTOR) for part in range(many)] for base in bases
        )
        with cgutils.for_range(builder, given[5]) as loop:
            place = _at(builder, numbers, loop.index, _WORD(_stored_bytes(kind, many)))
            for part, number in enumerate(_widened(builder, kind, place, many)):
                scaled = builder.fmul(builder.fsub(number, zeros[part]), scales[part])
                tile = _at(builder, wide, _WORD(part // few), apart, LINE * (part % few))
                _store(builder, scaled, _at(builder, tile, loop.index, _WORD(LINE * few)))
        return context.get_dummy_value()

    return signature, generate


def _add_scaled(_: Any, vectors: Any, _places: Any, _apart: Any, _of_x: Any) -> Any:
    """total += (part − zero · of_x) · scale, and part = 0, of 16 · `vectors` numbers each. `places` are the addresses
    of totals, parts, scales and zeros; the first two are so many bytes further on."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.void(vectors, types.UniTuple(types.intp, 4), types.intp, types.float32)
    many = vectors.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        totals, parts, scales, zeros = cgutils.unpack_tuple(builder, given[1])
        less = _spread(builder, builder.fneg(given[3]))
        for line in range(0, LINE * many, LINE):
            total, part = (_at(builder, base, given[2], _WORD(1), line) for base in (totals, parts))
            scale, zero = (_load(builder, _plus(builder, base, line), _VECTOR) for base in (scales, zeros))
            without = _multiply_add(builder, less, zero, _load(builder, part, _VECTOR))
            _store(builder, _multiply_add(builder, without, scale, _load(builder, total, _VECTOR)), total)
            _store(builder, _constant(0.0), part)
        return context.get_dummy_value()

    return signature, generate


def _stored_bytes(kind: Any, vectors: int) -> int:
    """Bytes of the weights of one input."""
    return LANES * vectors * _BITS[kind] // 8


def _widened(builder: Any, kind: Any, place: Value, vectors: int) -> list[Value]:
    """The weights of one input, of those at an address: as vectors of float32, but for pairs of inputs."""
    if vectors == HALF_LINES:
        words = _load(builder, place, _HALF_WHOLE)
        shift, mask = (ir.Constant(_HALF_WHOLE, [number] * (LANES // 2)) for number in (16, 0xFFFF0000))
        both = builder.shl(words, shift), builder.and_(words, mask)
        return [_joined(builder, *(builder.bitcast(half, _HALF_VECTOR) for half in both))]
    if kind == types.uint32:  # of two numbers side by side, bfloat16 is the upper half of a float32 each
        pairs = [_load(builder, _plus(builder, place, LINE * line), _WHOLE) for line in range(vectors // 2)]
        halves = [(builder.shl(pair, _flags(16)), builder.and_(pair, _flags(0xFFFF0000))) for pair in pairs]
        return [builder.bitcast(half, _VECTOR) for both in halves for half in both]
    size = _stored_bytes(kind, 1)
    places = [_plus(builder, place, size * part) for part in range(vectors)]
    if kind == types.uint64:  # multiplied as they are
        return [_load(builder, each, _WHOLE) for each in places]
    if kind == types.uint16:
        return [builder.fpext(_load(builder, each, _HALVES, size=2), _VECTOR) for each in places]
    if kind == types.int8:
        return [builder.sitofp(builder.sext(_load(builder, each, _BYTES, size=1), _WHOLE), _VECTOR) for each in places]
    if kind == types.int16:
        shorts = [builder.zext(_load(builder, each, _SHORTS, size=2), _WHOLE) for each in places]
        return [builder.bitcast(builder.shl(short, _flags(16)), _VECTOR) for short in shorts]
    if kind == types.uint8:  # sign, 4 bits of exponent, 3 of mantissa: in a half, whose exponent has 5, less by 8
        signed = [builder.sext(_load(builder, each, _BYTES, size=1), _SHORTS) for each in places]
        return [_half(builder, builder.shl(each, _shorts(7)), 0xBF80) for each in signed]
    if kind in (types.int32, types.int64):
        lines = [_load(builder, _plus(builder, place, LANES * line), _BYTES, size=1) for line in range(vectors // 2)]
        widen = _nibbles if kind == types.int32 else _shortest_floats
        return [number for line in lines for number in widen(builder, line)]
    return [_load(builder, each, _VECTOR) for each in places]


def _nibbles(builder: Any, line: Value) -> tuple[Value, Value]:
    """The lower and the upper halves of bytes, as float32."""
    wide = builder.zext(line, _WHOLE)
    low, high = builder.and_(wide, _flags(15)), builder.lshr(wide, _flags(4))
    return builder.sitofp(low, _VECTOR), builder.sitofp(high, _VECTOR)


def _shortest_floats(builder: Any, line: Value) -> tuple[Value, Value]:
    """The same of e2m1, as float32: sign, 2 bits of exponent, 1 of mantissa stand in a half at the places of its sign,
    the end of its exponent and the begin of its mantissa, so that its exponent is less by 14."""
    wide = builder.sext(line, _SHORTS)
    low = builder.ashr(builder.shl(wide, _shorts(12)), _shorts(3))
    return _half(builder, low, 0x8E00), _half(builder, builder.shl(wide, _shorts(5)), 0x8E00)


def _half(builder: Any, bits: Value, mask: int) -> Value:
    """Of 16 bits each, those of a mask, read as float16."""
    return builder.fpext(builder.bitcast(builder.and_(bits, _shorts(mask)), _HALVES), _VECTOR)


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


def _to_short_powers(_: Any, _out: Any, _place: Any, _fours: Any, _scale: Any, _less: Any) -> Any:
    """Writes 2^(x · scale - less) of each number x at an address, of four times so many vectors, to `out` as bfloat16,
    and gives the sum of what was not rounded yet. Otherwise as `to_powers`."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, address, fours, scale, less = given
        scale, less = _spread(builder, scale), builder.fneg(_spread(builder, less))
        known = [cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(_FOUR)]
        with cgutils.for_range(builder, fours) as loop:
            place = _at(builder, address, loop.index, _WORD(_FOUR * LINE))
            powers = []
            for index, total in enumerate(known):
                number = _load(builder, _plus(builder, place, LINE * index), _VECTOR)
                powers.append(_power(builder, _multiply_add(builder, number, scale, less)))
                builder.store(builder.fadd(builder.load(total), powers[-1]), total)
            for index in range(0, _FOUR, 2):
                end = _at(builder, out, loop.index, _WORD(_FOUR * LINE // 2), LINE * index // 2)
                _store(builder, _both_rounded(builder, *powers[index : index + 2]), end)
        first, second, third, last = (builder.load(total) for total in known)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, last))
        reduce = _declared(builder, "llvm.vector.reduce.fadd.v16f32", _SINGLE, [_SINGLE, _VECTOR])
        return builder.call(reduce, [_SINGLE(-0.0), total], fastmath=("reassoc",))

    return types.float32(types.intp, types.intp, types.intp, types.float32, types.float32), generate


def _both_rounded(builder: Any, first: Value, second: Value) -> Value:
    """32 bfloat16 of two vectors, one behind the other, as a vector. LLVM takes numbers of 16 bits for them."""
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    convert = _declared(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", shorts, [_VECTOR, _VECTOR])
    return builder.bitcast(builder.call(convert, [second, first]), _VECTOR)


def _gate(_: Any, _out: Any, _gates: Any, _values: Any, _vectors: Any) -> Any:
    """Sets so many vectors at `out` to silu(gate) · value, of gates and values at two other addresses."""
    return _gating(lambda _, gate: gate)


def _gelu_gate(_: Any, _out: Any, _gates: Any, _values: Any, _vectors: Any) -> Any:
    """The same with gelu(gate), by its hyperbolic tangent: 1 + tanh(x / 2) is twice the logistic function of x."""

    def bent(builder: Any, gate: Value) -> Value:
        square, slope = builder.fmul(gate, gate), _constant(GELU_SLOPE)
        return builder.fmul(gate, _multiply_add(builder, square, _constant(GELU_SLOPE * GELU_BEND), slope))

    return _gating(bent)


GELU_SLOPE, GELU_BEND = math.sqrt(8 / math.pi), 0.044715
"""gelu(x) is about x · logistic(slope · (x + bend · x³))."""


def _gating(steepened: Callable[[Any, Value], Value]) -> Any:
    """gate · logistic(steepened gate) · value."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, gates, values, vectors = given
        with cgutils.for_range(builder, vectors) as loop:
            places = [_at(builder, base, loop.index, _WORD(LINE)) for base in (gates, values)]
            gate, value = (_load(builder, place, _VECTOR) for place in places)
            power = _power(builder, builder.fmul(steepened(builder, gate), _constant(-math.log2(math.e))))
            opened = builder.fdiv(gate, builder.fadd(power, _constant(1.0)))
            _store(builder, builder.fmul(opened, value), _at(builder, out, loop.index, _WORD(LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _score_keys(_: Any, rows: Any, _places: Any, _last: Any, _words: Any) -> Any:
    """Products of `rows` queries, a literal, with eight keys in bfloat16, that is of these with each of `_TOGETHER`
    places from an address on, of which those behind place `last` stand for it.

    `places` are (address of scores, bytes from one query's to the next's, address of queries, bytes from one to the
    next, address of keys, bytes from one to the next, address of the keys that come next). A key has so many `words` of
    two numbers; a query is float32, for each 16 words the 16 first numbers and then the 16 second ones, with zeros
    behind the last.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    signature, many = types.void(rows, types.UniTuple(types.intp, 7), types.intp, types.intp), rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        scores, apart, queries, further, keys, step, coming = cgutils.unpack_tuple(builder, given[1])
        places = [_clamped_place(builder, keys, place, given[2], step) for place in range(_TOGETHER)]
        sums = [[cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(_TOGETHER)] for _ in range(many)]
        with _over_words(builder, given[3]) as (vector, mask):
            parts = [
                [
                    _load(
                        builder,
                        _at(builder, _at(builder, queries, _WORD(row), further), vector, _WORD(2 * LINE), more),
                        _VECTOR,
                    )
                    for more in (0, LINE)
                ]
                for row in range(many)
            ]
            for index, place in enumerate(places):
                _ask(builder, _at(builder, _at(builder, coming, _WORD(index), step), vector, _WORD(LINE)))
                key = _both_halves(builder, _load_words(builder, _at(builder, place, vector, _WORD(LINE)), mask))
                for row in range(many):
                    total = builder.load(sums[row][index])
                    for part, half in zip(parts[row], key, strict=True):
                        total = _multiply_add(builder, part, half, total)
                    builder.store(total, sums[row][index])
        for row in range(many):
            found = _totals(builder, [builder.load(total) for total in sums[row]])
            place = _at(builder, scores, _WORD(row), apart)
            builder.store(found, _pointer(builder, place, found.type)).align = FLOAT
        return context.get_dummy_value()

    return signature, generate


def _add_values(_: Any, rows: Any, _places: Any, _last: Any, _words: Any) -> Any:
    """The sums of `rows` queries, a literal, grow by eight values in bfloat16, each times its weight; values are found
    as keys are by `score_keys`, and those behind place `last` have to weigh 0.

    `places` are (address of weights, bytes from one query's to the next's, address of sums, bytes from one to the
    next, address of values, bytes from one to the next, address of the values that come next). Sums lie as queries do.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    signature, many = types.void(rows, types.UniTuple(types.intp, 7), types.intp, types.intp), rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        weights, apart, sums, further, values, step, coming = cgutils.unpack_tuple(builder, given[1])
        places = [_clamped_place(builder, values, place, given[2], step) for place in range(_TOGETHER)]
        shares = [
            [
                _spread(builder, _load(builder, _at(builder, weights, _WORD(row), apart, FLOAT * place), _SINGLE))
                for place in range(_TOGETHER)
            ]
            for row in range(many)
        ]
        with _over_words(builder, given[3]) as (vector, mask):
            ends = [
                [
                    _at(builder, _at(builder, sums, _WORD(row), further), vector, _WORD(2 * LINE), more)
                    for more in (0, LINE)
                ]
                for row in range(many)
            ]
            totals = [[[_load(builder, end, _VECTOR), None] for end in both] for both in ends]
            for index, place in enumerate(places):
                _ask(builder, _at(builder, _at(builder, coming, _WORD(index), step), vector, _WORD(LINE)))
                value = _both_halves(builder, _load_words(builder, _at(builder, place, vector, _WORD(LINE)), mask))
                for row in range(many):
                    for total, half in zip(totals[row], value, strict=True):
                        chain = index % 2  # a sum waits for the one before it
                        known = total[chain]
                        share = shares[row][index]
                        total[chain] = (
                            builder.fmul(share, half) if known is None else _multiply_add(builder, share, half, known)
                        )
            for row in range(many):
                for total, end in zip(totals[row], ends[row], strict=True):
                    _store(builder, builder.fadd(*total), end)
        return context.get_dummy_value()

    return signature, generate


def _clamped_place(builder: Any, base: Value, place: int, last: Value, step: Value) -> Value:
    """The address of a place, or of the last one if that is before it."""
    index = builder.select(builder.icmp_signed("<", last, _WORD(place)), last, _WORD(place))
    return _at(builder, base, index, step)


@contextmanager
def _over_words(builder: Any, words: Value) -> Iterator[tuple[Value, Value]]:
    """A loop over vectors of 16 words, the last of which may have fewer: its index, and a mask of its words."""
    lanes = ir.Constant(_WHOLE, list(range(LANES)))
    vectors = builder.sdiv(_plus(builder, words, LANES - 1), _WORD(LANES))
    with cgutils.for_range(builder, vectors) as loop:
        left = builder.sub(words, builder.mul(loop.index, _WORD(LANES)))
        yield loop.index, builder.icmp_signed("<", lanes, _spread_whole(builder, builder.trunc(left, _FLAG)))


def _load_words(builder: Any, address: Value, mask: Value) -> Value:
    """16 words, of which those outside of the mask are zeros, and not read."""
    kinds = [_WHOLE.as_pointer(), _FLAG, ir.VectorType(ir.IntType(1), LANES), _WHOLE]
    load = _declared(builder, "llvm.masked.load.v16i32.p0", _WHOLE, kinds)
    return builder.call(load, [_pointer(builder, address, _WHOLE), _FLAG(2), mask, _flags(0)])


def _widened_number(_: Any, number: Any) -> Any:
    """A float32 as it is; of the bits of a bfloat16, uint16, the float32."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        if number == types.float32:
            return given[0]
        return builder.bitcast(builder.shl(builder.zext(given[0], _FLAG), _FLAG(16)), _SINGLE)

    return types.float32(number), generate


def _lower_number(_: Any, word: Any) -> Any:
    """The float32 of the bfloat16 that is the lower half of a word, uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.bitcast(builder.shl(given[0], _FLAG(16)), _SINGLE)

    return types.float32(word), generate


def _upper_number(_: Any, word: Any) -> Any:
    """The same of the upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.bitcast(builder.and_(given[0], _FLAG(0xFFFF0000)), _SINGLE)

    return types.float32(word), generate


def _widened_half(_: Any, number: Any) -> Any:
    """Of the bits of a float16, uint16, the float32."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.fpext(builder.bitcast(given[0], ir.HalfType()), _SINGLE)

    return types.float32(number), generate


def _both_halves(builder: Any, words: Value) -> tuple[Value, Value]:
    """The lower and the upper bfloat16 of words, as float32."""
    halves = builder.shl(words, _flags(16)), builder.and_(words, _flags(0xFFFF0000))
    return builder.bitcast(halves[0], _VECTOR), builder.bitcast(halves[1], _VECTOR)


def _totals(builder: Any, vectors: Sequence[Value]) -> Value:
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
            builder.fadd(*(builder.shuffle_vector(one, other, _lanes(lanes)) for lanes in (first, others)))
            for one, other in pairs
        ]
        width = half
    return known[0]


def _lanes(numbers: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(_FLAG, len(numbers)), list(numbers))


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
    if _SCALES:
        mask, as_set = ir.IntType(LANES), _FLAG
        scale = _declared(builder, "llvm.x86.avx512.mask.scalef.ps.512", _VECTOR, [_VECTOR] * 3 + [mask, as_set])
        return builder.call(scale, [value, whole, value, mask(-1), as_set(4)])
    # The whole part becomes an exponent: the highest stands for infinity, and what is below the least gives 0.
    bounded = builder.select(builder.fcmp_ordered("<", whole, _constant(_INFINITE)), whole, _constant(_INFINITE))
    exponent = builder.fptosi(builder.fadd(bounded, _constant(_BIAS)), _WHOLE)
    moved = builder.fmul(value, builder.bitcast(builder.shl(exponent, _flags(23)), _VECTOR))
    return builder.select(builder.fcmp_ordered("<", whole, _constant(1.0 - _BIAS)), _constant(0.0), moved)


def _at(builder: Any, base: Value, index: Value, step: Value, more: int = 0) -> Value:
    return _plus(builder, builder.add(base, builder.mul(index, step)), more)


def _pointer(builder: Any, address: Value, kind: Any) -> Value:
    return builder.inttoptr(address, kind.as_pointer())


def _plus(builder: Any, base: Value, more: int) -> Value:
    return builder.add(base, _WORD(more))


def _ask(builder: Any, address: Value) -> None:
    """Has the line at an address fetched: to read, often, as data."""
    prefetch = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), [_BYTE.as_pointer(), _FLAG, _FLAG, _FLAG])
    builder.call(prefetch, [_pointer(builder, address, _BYTE), _FLAG(0), _FLAG(3), _FLAG(1)])


def _load(builder: Any, address: Value, kind: Any, *, size: int = FLOAT) -> Value:
    """A value whose numbers have so many bytes."""
    value = builder.load(_pointer(builder, address, kind))
    value.align = size
    return value


def _store(builder: Any, value: Value, address: Value) -> None:
    builder.store(value, _pointer(builder, address, _VECTOR)).align = FLOAT


def _load_vector(builder: Any, address: Value) -> Value:
    return _load(builder, address, _VECTOR)


def _load_half_lines(builder: Any, address: Value) -> Value:
    """A vector of `HALF_LINES`."""
    halves = (_load(builder, _plus(builder, address, LINE * half), _HALF_VECTOR) for half in range(2))
    return _joined(builder, *halves)


def _store_half_lines(builder: Any, value: Value, address: Value) -> None:
    for half in range(2):
        lanes = _lanes(range(half * LANES // 2, (half + 1) * LANES // 2))
        part = builder.shuffle_vector(value, value, lanes)
        place = _pointer(builder, _plus(builder, address, LINE * half), _HALF_VECTOR)
        builder.store(part, place).align = FLOAT


def _joined(builder: Any, first: Value, second: Value) -> Value:
    """One vector of two of half its length."""
    return builder.shuffle_vector(first, second, _lanes(range(LANES)))


def _constant(number: float) -> Value:
    return ir.Constant(_VECTOR, [number] * LANES)


def _flags(number: int) -> Value:
    return ir.Constant(_WHOLE, [number] * LANES)


def _shorts(number: int) -> Value:
    return ir.Constant(_SHORTS, [number] * LANES)


def _spread(builder: Any, number: Value) -> Value:
    """A vector of one number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _FLAG(0))
    return builder.shuffle_vector(first, undefined, _flags(0))


def _spread_whole(builder: Any, number: Value) -> Value:
    """The same of a whole number."""
    undefined = ir.Constant(_WHOLE, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, _FLAG(0)), undefined, _flags(0))


def _add_pairs(builder: Any, total: Value, one: Value, other: Value) -> Value:
    """total + the products of bfloat16, two by two. LLVM takes words for these as well as its own type, which llvmlite
    has no name for."""
    product = _declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, [_VECTOR, _WHOLE, _WHOLE])
    return builder.call(product, [total, one, other])


def _multiply_add(builder: Any, one: Value, other: Value, more: Value) -> Value:
    return builder.call(_declared(builder, "llvm.fma.v16f32", _VECTOR, [_VECTOR] * 3), [one, other, more])


def _declared(builder: Any, name: str, result: Any, arguments: Any) -> Value:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


add_products: Any = intrinsic(_add_products)
in_pairs: Any = intrinsic(_in_pairs)
widened: Any = intrinsic(_widened_number)
lower_half: Any = intrinsic(_lower_number)
upper_half: Any = intrinsic(_upper_number)
widened_half: Any = intrinsic(_widened_half)
widened_stretch: Any = intrinsic(_widened_stretch)
scaled_stretch: Any = intrinsic(_scaled_stretch)
add_scaled: Any = intrinsic(_add_scaled)
highest: Any = intrinsic(_highest)
to_powers: Any = intrinsic(_to_powers)
to_short_powers: Any = intrinsic(_to_short_powers)
gate: Any = intrinsic(_gate)
gelu_gate: Any = intrinsic(_gelu_gate)
score_keys: Any = intrinsic(_score_keys)
add_values: Any = intrinsic(_add_values)
