"""A product of few rows with a weight that oneDNN has laid out, compiled by numba around a core of LLVM's own vectors.

Few rows wait for memory. oneDNN's product asks for a line of the weight when it comes to it; this one asks for the next
stretch while it computes with the last (docs/PERFORMANCE.md). numba has no vectors that stay in registers over a
loop, hence the core. A row's sums are taken in the same order whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.blocked import WIDTH, Array
from common.kernels.jit import compiled

_LANES = 16
_FLOAT, _LINE = 4, 64
_STRETCH = 64
"""Inputs that all rows go through before the next: 16 KiB of a panel, half of most first-level caches."""
_TOGETHER = 4
"""Rows whose sums are kept in registers, with a panel's weights for one input."""


Value = Any
"""A value of LLVM's, as its builder gives them."""


def _add_products(_: Any, rows: Any, lines: Any, _places: Any, _count: Any) -> Any:
    """For each of `rows` rows: out[0:64] += Σ over `count` inputs of x[input] · weights[input, 0:64].

    `rows` and `lines` are literals; `places` are (address of out, bytes from one row of it to the next, the same of x,
    address of weights, address of what comes next). For each input it also asks for `lines` lines of what comes next.
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(lines, types.IntegerLiteral)):
        return None  # numba asks again, with what it knows of constants
    signature = types.void(rows, lines, types.UniTuple(types.intp, 6), types.intp)

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        places, count = cgutils.unpack_tuple(builder, given[2]), given[3]
        _write_core(builder, rows.literal_value, lines.literal_value, places, count)
        return context.get_dummy_value()

    return signature, generate


def _write_core(builder: Any, rows: int, lines: int, places: list[Value], count: Value) -> None:
    """The loop over inputs, with the sums of `rows` rows in registers."""
    out, out_step, x, x_step, weights, coming = places
    parts, word, flag = range(WIDTH // _LANES), ir.IntType(64), ir.IntType(32)
    single, vector, byte = ir.FloatType(), ir.VectorType(ir.FloatType(), _LANES), ir.IntType(8)
    multiply_add = _declared(builder, "llvm.fma.v16f32", vector, [vector] * 3)
    prefetch = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), [byte.as_pointer(), flag, flag, flag])
    undefined, zeros = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(flag, _LANES), [0] * _LANES)

    def at(base: Value, index: Value, step: Value, more: int = 0) -> Value:
        return builder.add(builder.add(base, builder.mul(index, step)), word(more))

    def pointer(address: Value, kind: Any) -> Value:
        return builder.inttoptr(address, kind.as_pointer())

    def load(address: Value, kind: Any) -> Value:
        value = builder.load(pointer(address, kind))
        value.align = _FLOAT
        return value

    ends = [[at(out, word(row), out_step, _LINE * part) for part in parts] for row in range(rows)]
    before, begin = builder.block, [[load(end, vector) for end in row] for row in ends]
    loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(word)
    sums = [[builder.phi(vector) for _ in parts] for _ in range(rows)]
    weight = [load(at(weights, index, word(_FLOAT * WIDTH), _LINE * part), vector) for part in parts]
    for line in range(lines):
        address = at(coming, index, word(_LINE * lines), _LINE * line)
        builder.call(prefetch, [pointer(address, byte), flag(0), flag(3), flag(1)])  # to read, often, as data
    totals = []
    for row in range(rows):
        number = load(at(at(x, word(row), x_step), index, word(_FLOAT)), single)
        spread = builder.shuffle_vector(builder.insert_element(undefined, number, flag(0)), undefined, zeros)
        totals.append([builder.call(multiply_add, [spread, weight[part], sums[row][part]]) for part in parts])
    following = builder.add(index, word(1))
    index.add_incoming(word(0), before)
    index.add_incoming(following, loop)
    for row in range(rows):
        for part in parts:
            sums[row][part].add_incoming(begin[row][part], before)
            sums[row][part].add_incoming(totals[row][part], loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

    builder.position_at_end(after)
    for row in range(rows):
        for part in parts:
            builder.store(totals[row][part], pointer(ends[row][part], vector)).align = _FLOAT


def _declared(builder: Any, name: str, result: Any, arguments: Any) -> Value:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


_add: Any = intrinsic(_add_products)


@numba.njit(inline="always")
def _add_rows(lines: Any, rows: Any, places: Any, count: Any) -> None:
    """`_add_products` for any number of rows."""
    out, out_step, x, x_step, weights, coming = places
    for row in range(0, rows, _TOGETHER):
        here = (out + row * out_step, out_step, x + row * x_step, x_step, weights, coming)
        if rows - row >= _TOGETHER:
            _add(_TOGETHER, lines, here, count)
        elif rows - row == 3:
            _add(3, lines, here, count)
        elif rows - row == 2:
            _add(2, lines, here, count)
        else:
            _add(1, lines, here, count)
        coming += count * lines * _LINE


def _product(out: Any, x: Any, panels: Any, bias: Any) -> None:
    """float32 out [m, outputs], x [m, k], panels [n, k or more, 64], bias [outputs] or [0].

    While a stretch is computed, the next is asked for: so many lines for each input and four rows. The rows'
    numbers are put side by side first: as far apart as rows lie, they would push each other out of the cache.
    """
    rows, inputs = x.shape
    stretches = (inputs + _STRETCH - 1) // _STRETCH
    packed = np.empty((stretches, rows, _STRETCH), np.float32)
    for row in range(rows):
        for place in range(inputs):
            packed[place // _STRETCH, row, place % _STRETCH] = x[row, place]
    for panel in numba.prange(panels.shape[0]):
        first = np.intp(panel) * WIDTH
        here = min(WIDTH, out.shape[1] - first)
        sums = np.zeros((rows, WIDTH), np.float32)
        for stretch in range(stretches):
            count = min(_STRETCH, inputs - stretch * _STRETCH)
            weights = panels.ctypes.data + (first * panels.shape[1] + stretch * _STRETCH * WIDTH) * _FLOAT
            numbers = packed.ctypes.data + stretch * rows * _STRETCH * _FLOAT
            coming = weights + _STRETCH * WIDTH * _FLOAT
            places = (sums.ctypes.data, WIDTH * _FLOAT, numbers, _STRETCH * _FLOAT, weights, coming)
            if rows <= _TOGETHER:
                _add_rows(4, rows, places, count)
            elif rows <= 2 * _TOGETHER:
                _add_rows(2, rows, places, count)
            else:
                _add_rows(1, rows, places, count)
        for row in range(rows):
            for place in range(here):
                out[row, first + place] = sums[row, place] + bias[first + place] if len(bias) else sums[row, place]


_kernel = compiled(_product)


def product(x: Array, panels: Array, bias: Array, shape: tuple[int, int]) -> Array:
    """x float32 [m, inputs] → x Wᵀ + b, float32 [m, outputs]; for panels and bias see `_product`.

    `shape` is (outputs, inputs). Raises ValueError where x has another shape or type.
    """
    outputs, inputs = shape
    if x.ndim != 2 or x.shape[1] != inputs or x.dtype != np.float32:
        raise ValueError(f"{x.dtype} {x.shape} does not fit a weight of {inputs} inputs")
    out = np.empty((x.shape[0], outputs), np.float32)
    _kernel(out, np.ascontiguousarray(x), panels, bias)
    return out
