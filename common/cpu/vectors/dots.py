"""Dot products of a row with several rows of weights, lane by lane, for inputs that are adjacent in memory; `products`
sums over inputs that are rows of a panel."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import LINE, SINGLE, VECTOR, WORD, Value, at, declared, load, multiply_add, plus, store
from common.cpu.vectors.stored import stored_bytes, widened_line


def _add_dots(_: Any, vectors: Any, stored: Any, _places: Any, _count: Any) -> Any:
    """For each of `count` rows of weights: sums[row, 0:16] += Σ x[part] · weights[row, part] over `vectors` parts of 16
    numbers, lane by lane. `vectors` is a literal; `stored` is an array of the weights' dtype. `places` are the
    addresses of float32 sums and x, and of the weights, whose rows are adjacent."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    signature = types.void(vectors, stored, types.UniTuple(types.intp, 3), types.intp)
    many, kind = vectors.literal_value, stored.dtype

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        sums, x, weights = cgutils.unpack_tuple(builder, given[2])
        size = stored_bytes(kind, many)
        numbers = [load(builder, plus(builder, x, LINE * part), VECTOR) for part in range(many)]
        with cgutils.for_range(builder, given[3]) as loop:
            to = at(builder, sums, loop.index, WORD(LINE))
            total = load(builder, to, VECTOR)
            line = widened_line(builder, kind, at(builder, weights, loop.index, WORD(size)), many)
            for number, weight in zip(numbers, line, strict=True):
                total = multiply_add(builder, number, weight, total)
            store(builder, total, to)
        return context.get_dummy_value()

    return signature, generate


def _sum_of_lanes(_: Any, _place: Any) -> Any:
    """The sum of the 16 float32 at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        total = declared(builder, "llvm.vector.reduce.fadd.v16f32", SINGLE, [SINGLE, VECTOR])
        zero = ir.Constant(SINGLE, 0.0)
        return builder.call(total, [zero, load(builder, given[0], VECTOR)], fastmath=("reassoc",))

    return types.float32(types.intp), generate


add_dots: Any = intrinsic(_add_dots)
sum_of_lanes: Any = intrinsic(_sum_of_lanes)
