"""Products of pairs of bfloat16, and of quads of 8-bit integers, by tiles (AMX): eight registers of up to 16 rows of a
line. Callers have asked `common.hardware.multiplies_tiles` first: Linux ends a process that uses tiles unpermitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import (
    BYTE,
    LANES,
    LINE,
    WORD,
    Value,
    ask,
    at,
    declared,
    load_vector,
    plus,
    pointer,
    store,
)
from common.cpu.vectors.powers import both_rounded

BLOCK = 16
"""Rows of a tile, and pairs that one product adds up."""
_TILES, _SUMS = 8, 4
"""Tile registers, and how many of them hold sums."""
_ROWS_AT = 48
"""Bytes of a configuration before the rows of each register; before these are the bytes of a row, 16 bits each."""


def _configure_tiles(_: Any, _rows: Any) -> Any:
    """Configures tiles for `add_tiles` of one block with `rows` rows, 1 to `BLOCK`, in this thread; with `BLOCK`, for
    two blocks. The tiles' contents are lost."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        rows = builder.trunc(given[0], BYTE)
        shape = cgutils.alloca_once(builder, ir.ArrayType(BYTE, LINE))
        builder.store(ir.Constant(ir.ArrayType(BYTE, LINE), [1] + [0] * (LINE - 1)), shape)  # the only palette
        base = builder.ptrtoint(shape, WORD)
        for tile in range(_TILES):
            builder.store(BYTE(LINE), pointer(builder, plus(builder, base, LANES + 2 * tile), BYTE))
            weights = _weights(1)
            of_tile = BYTE(BLOCK) if tile in weights else rows
            builder.store(of_tile, pointer(builder, plus(builder, base, _ROWS_AT + tile), BYTE))
        _call(builder, "ldtilecfg", pointer(builder, base, BYTE))
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _release_tiles(_: Any) -> Any:
    """Releases the tiles of this thread, so that they need not be saved while it waits. Every use of tiles ends with
    it."""

    def generate(context: Any, builder: Any, _signature: Any, _given: Any) -> Value:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _add_tiles(_: Any, blocks: Any, across: Any, _lines: Any, _places: Any, _count: Any) -> Any:
    """For each row of `blocks` blocks: out[0:w] += Σ over `count` > 0 times 16 pairs of x[pair] · weights[pair, 0:w].

    x and weights are words, two bfloat16 of two inputs; w is 16 · `across`. `blocks` and `across` are literals whose
    product is at most 4, since sums stay in tiles. The products of 16 pairs are summed in float32, then added to the
    sum, in one order for any rows. `places` are (address of out, bytes from one row of it to the next, the same of x,
    address of weights, bytes from one pair of them to the next, address of what comes next): of this, `lines` cache
    lines, a multiple of `across`, are prefetched with each 16 pairs. Rows that begin at a cache line are read fastest.
    """
    return _products(blocks, across, "tdpbf16ps", fresh=False)


def _multiply_tiles(_: Any, blocks: Any, across: Any, _lines: Any, _places: Any, _count: Any) -> Any:
    """As `add_tiles`, but sums start at 0: `out` is not read."""
    return _products(blocks, across, "tdpbf16ps", fresh=True)


def _add_quad_tiles(_: Any, blocks: Any, across: Any, _lines: Any, _places: Any, _count: Any) -> Any:
    """As `add_tiles`, for quads instead of pairs: words of x are four signed 8-bit numbers, words of weights four
    unsigned ones, and sums are int32."""
    return _products(blocks, across, "tdpbsud", fresh=False)


def _multiply_quad_tiles(_: Any, blocks: Any, across: Any, _lines: Any, _places: Any, _count: Any) -> Any:
    """The same to sums that begin at 0."""
    return _products(blocks, across, "tdpbsud", fresh=True)


def _products(blocks: Any, across: Any, product: str, *, fresh: bool) -> Any:
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (blocks, across)):
        return None  # numba asks again once it knows the constants
    shape = blocks.literal_value, across.literal_value

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        places = cgutils.unpack_tuple(builder, given[3])
        _write_products(builder, shape, product, given[2], places, given[4], fresh=fresh)
        return context.get_dummy_value()

    return types.void(blocks, across, types.intp, types.UniTuple(types.intp, 7), types.intp), generate


def _write_products(
    builder: Any,
    shape: tuple[int, int],
    product: str,
    lines: Value,
    places: Sequence[Value],
    count: Value,
    *,
    fresh: bool,
) -> None:
    """The loop over all words, by the instruction of a product."""
    (blocks, across), (out, out_step, x, x_step, weights, size, coming) = shape, places
    sums = {
        block * across + part: at(builder, out, WORD(block * BLOCK), out_step, LINE * part)
        for block in range(blocks)
        for part in range(across)
    }
    numbers, others = [_SUMS + block for block in range(blocks)], _weights(blocks)
    for tile, place in sums.items():
        if fresh:
            _call(builder, "tilezero", BYTE(tile))
        else:
            _load(builder, tile, place, out_step)
    with cgutils.for_range(builder, count) as loop:
        pairs = at(builder, weights, builder.mul(loop.index, WORD(BLOCK)), size)
        share = at(builder, coming, builder.mul(loop.index, lines), WORD(LINE))
        several = builder.sdiv(lines, WORD(across))
        for part in range(across):
            with cgutils.for_range(builder, several) as asked:
                line = builder.add(asked.index, builder.mul(several, WORD(part)))
                ask(builder, at(builder, share, line, WORD(LINE)))
            weight = others[part % len(others)]
            _load(builder, weight, plus(builder, pairs, LINE * part), size)
            for block, tile in enumerate(numbers):
                if part == 0:
                    first = at(builder, x, WORD(block * BLOCK), x_step)
                    _load(builder, tile, at(builder, first, loop.index, WORD(LINE)), x_step)
                _call(builder, product, BYTE(block * across + part), BYTE(tile), BYTE(weight))
    for tile, place in sums.items():
        _call(builder, "tilestored64", BYTE(tile), pointer(builder, place, BYTE), out_step)


def _round_row(_: Any, _out: Any, _x: Any, _vectors: Any) -> Any:
    """Rounds the float32 of 2 · `vectors` vectors to bfloat16, from one address to another: words of pairs. NaN stays
    NaN."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, vectors = given
        with cgutils.for_range(builder, vectors) as loop:
            place = at(builder, x, loop.index, WORD(2 * LINE))
            both = load_vector(builder, place), load_vector(builder, plus(builder, place, LINE))
            store(builder, both_rounded(builder, *both), at(builder, out, loop.index, WORD(LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _weights(blocks: int) -> range:
    """Registers that hold weights."""
    return range(_SUMS + blocks, _TILES)


def _load(builder: Any, tile: int, place: Value, step: Value) -> None:
    _call(builder, "tileloadd64", BYTE(tile), pointer(builder, place, BYTE), step)


def _call(builder: Any, name: str, *given: Value) -> None:
    """An instruction that LLVM has a function for."""
    kinds = [value.type for value in given]
    builder.call(declared(builder, f"llvm.x86.{name}", ir.VoidType(), kinds), given)


configure_tiles: Any = intrinsic(_configure_tiles)
release_tiles: Any = intrinsic(_release_tiles)
add_tiles: Any = intrinsic(_add_tiles)
multiply_tiles: Any = intrinsic(_multiply_tiles)
add_quad_tiles: Any = intrinsic(_add_quad_tiles)
multiply_quad_tiles: Any = intrinsic(_multiply_quad_tiles)
round_row: Any = intrinsic(_round_row)
