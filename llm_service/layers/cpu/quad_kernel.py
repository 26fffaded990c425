"""A product of rows that are rounded to 8 bits, each with a scale of its own, with a weight of 8 bits in panels of
quads (`llm_service.layers.cpu.quad_panels`), compiled by numba for processors with AVX512-VNNI. Sums are whole numbers,
so they are exact."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import panel_tasks, phases, vectors, weight_panels
from common.cpu.jit import Array, Typed, exact, inner, threads_used
from common.cpu.panel_tasks import SIZE, check_rows, product_work
from common.cpu.phases import counts_of
from common.cpu.routines import Routine, parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.products import ROWS, write_whole_sums
from common.cpu.vectors.whole import largest_magnitude, round_to_bytes
from common.cpu.weight_panels import VECTORS, WIDTH, first_line
from llm_service.layers.cpu import panel_kernel
from llm_service.layers.cpu.panel_kernel import AT_ONCE, FEW, TOGETHER, add_rows, task_rows

QUAD = 4
"""Inputs whose weights for one output lie side by side."""
_STORED = (np.empty(0, np.int8),) * QUAD
"""Of the type that quads are stored in."""
_STRETCH = 64
"""Quads of inputs that all rows go through before the next: 16 KiB of a panel, half of most first-level caches."""
_INPUTS = QUAD * _STRETCH
OFFSET = 128
"""Added to weights, so that they are unsigned."""
STEPS = np.float32(127.5)
"""Of a row's largest number, how many steps it is divided into: as compressed-tensors has it, so that as many are above
zero as below."""


@inner
def packed_rows(rows: Any, quads: Any) -> Any:
    """Room for rows of so many quads, int8 [stretches, rows + 1, 256], all zeros; for their scales, float32 [rows]; and
    for their sums, int32 [rows]."""
    numbers = np.zeros(((quads + _STRETCH - 1) // _STRETCH, rows + 1, _INPUTS), np.int8)
    return numbers, np.empty(rows, np.float32), np.empty(rows, np.int32)


@exact
def pack_row(
    place: Any, apart: Any, width: Any, scales: Any, sums: Any, row: Any, x: Any, source: Any, step: Any
) -> None:
    """Rounds row `source` of x [n, k], float32, to int8: `width` numbers, a multiple of 16, side by side at an address,
    the next ones `apart` bytes on. Also sets the scale and the sum of `row`. The scale is `step`, or, if that is 0, the
    row's own. If a number is not finite, the scale is NaN and no numbers are written."""
    inputs = x.shape[1]
    whole, left, every = inputs // LANES, inputs % LANES, width // LANES
    begin, rest = x.ctypes.data + source * inputs * FLOAT, np.zeros(LANES, np.float32)
    for number in range(left):
        rest[number] = x[source, whole * LANES + number]
    of_whole, of_rest = largest_magnitude(begin, whole), largest_magnitude(rest.ctypes.data, 1)
    if not (of_whole < np.float32(np.inf) and of_rest < np.float32(np.inf)):
        scales[row] = np.float32(np.nan)
        sums[row] = 0
        return
    largest = max(of_whole, of_rest)
    scale = step
    if scale == np.float32(0.0):
        scale = largest / STEPS if largest > np.float32(0.0) else np.float32(1.0)
    total = first = 0
    while first < whole:
        count = min(every, whole - first)
        total += round_to_bytes(place + first // every * apart, begin + first * LANES * FLOAT, scale, count)
        first += count
    if left:
        total += round_to_bytes(place + whole // every * apart + whole % every * LANES, rest.ctypes.data, scale, 1)
    scales[row] = scale
    sums[row] = total


@inner
def pack_quads(numbers: Any, scales: Any, sums: Any, row: Any, x: Any, source: Any, step: Any) -> None:
    """Fills a row of `packed_rows` with one of x [n, k], float32; `step` as in `pack_row`."""
    place, apart = numbers.ctypes.data + row * _INPUTS, numbers.shape[1] * _INPUTS
    pack_row(place, apart, _INPUTS, scales, sums, row, x, source, step)


def _sum_panel(sums: Any, numbers: Any, apart: Any, weights: Any, quads: Any, rows: Any) -> None:
    """Adds a panel's products to int32 sums [rows, 64], all given by address: rows of numbers as `packed_rows` has
    them, with the bytes from one stretch of them to the next."""
    size = WIDTH * QUAD
    for first in range(0, quads, _STRETCH):
        count, here = min(_STRETCH, quads - first), weights + first * size
        x = numbers + first // _STRETCH * apart
        places = (sums, WIDTH * FLOAT, x, _INPUTS, here, here + _STRETCH * size, size)
        if rows <= TOGETHER:
            add_rows(VECTORS, VECTORS, 1, _STORED, (0, rows), places, count)
        elif rows <= 3 * TOGETHER:
            add_rows(VECTORS, VECTORS, 2, _STORED, (0, rows), places, count)
        else:
            add_rows(VECTORS, VECTORS, 4, _STORED, (0, min(FEW, rows)), places, count)
            add_rows(VECTORS, VECTORS, ROWS, _STORED, (FEW, rows), places, count)


SUM = Routine(_sum_panel, made_of=[vectors, weight_panels, panel_kernel])
_sum = SUM.call


@inner
def write_row(
    to: Any, room: Any, index: Any, row: Any, panel: Any, scales: Any, sums: Any, weight: Any, bias: Any
) -> None:
    """Writes a row's 64 outputs of a panel to an address, from their sums at an index of `room`, which are as `sums_of`
    gives them."""
    of_row = room.ctypes.data + (first_line(room) + index * WIDTH) * FLOAT
    constants = weight.ctypes.data + panel * WIDTH * FLOAT, bias.ctypes.data + panel * WIDTH * FLOAT
    write_whole_sums(VECTORS, (to, of_row, *constants), np.int32(-OFFSET * sums[row]), scales[row])


@inner
def write_rows(
    out: Any, panel: Any, begin: Any, rows: Any, room: Any, scales: Any, sums: Any, weight: Any, bias: Any
) -> None:
    """Fills out [begin : begin + rows] of one panel's outputs from their sums in `room`."""
    first, aside = panel * WIDTH, np.empty(WIDTH, np.float32)
    width = min(WIDTH, out.shape[1] - first)
    for row in range(begin, begin + rows):
        if width == WIDTH:
            to = out.ctypes.data + (row * out.shape[1] + first) * FLOAT
            write_row(to, room, row - begin, row, panel, scales, sums, weight, bias)
        else:
            write_row(aside.ctypes.data, room, row - begin, row, panel, scales, sums, weight, bias)
            for place in range(width):
                out[row, first + place] = aside[place]


@inner
def sums_of(packed: Any, panels: Any, panel: Any, begin: Any, rows: Any) -> Any:
    """The sums of one panel and the rows [begin : begin + rows], int32 [rows, 64] from the first line of an array on,
    as they are of weights without a sign."""
    quads, apart = panels.shape[1], packed.shape[1] * _INPUTS
    room = np.zeros((rows + 1) * WIDTH + LANES, np.float32)
    totals = room.ctypes.data + first_line(room) * FLOAT
    numbers = packed.ctypes.data + begin * _INPUTS
    _sum((totals, numbers, apart, panels.ctypes.data + panel * quads * WIDTH * QUAD, quads, rows))
    return room


@inner
def multiply(
    out: Any,
    packed: Any,
    scales: Any,
    sums: Any,
    panels: Any,
    weight: Any,
    bias: Any,
    panel: Any,
    begin: Any,
    rows: Any,
) -> None:
    """Fills out [begin : begin + rows] of one panel's outputs; the others are as in `_product`."""
    room = sums_of(packed, panels, panel, begin, rows)
    write_rows(out, panel, begin, rows, room, scales, sums, weight, bias)


@numba.njit(inline="always")
def _pack(row: Any, given: Any) -> None:
    _, (packed, scales, sums), x, _, step = given
    pack_quads(packed, scales, sums, row, x, row, step)


@numba.njit(inline="always")
def _multiply(task: Any, given: Any) -> None:
    out, (packed, scales, sums), _, (panels, weight, bias), _ = given
    begin, rows, panel, _ = task
    multiply(out, packed, scales, sums, panels, weight, bias, panel, begin, rows)


_work = product_work(_pack, _multiply)


def _product(out: Any, x: Any, panels: Any, weight: Any, bias: Any, step: Any, size: Any, threads: Any) -> None:
    """Fills float32 out [m, outputs] from x [m, k] and panels, whose scale is `weight`; these and `step` are as in
    `QuadPanels`. Bias is as long as the scale. A task has `size` rows of one panel's outputs."""
    rows, packed = x.shape[0], packed_rows(x.shape[0], panels.shape[1])
    given = out, packed, x, (panels, weight, bias), step
    parallel_for(_work, (counts_of(2, threads), rows, panels.shape[0], size, given), threads)


_kernel = threaded(_product, [panel_tasks, phases, vectors, weight_panels, panel_kernel], [SUM])
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
TYPED = {
    "sum": Typed(SUM, ()),
    "product": Typed(
        _kernel, (_matrix, _matrix, numba.uint32[:, :, ::1], _vector, _vector, numba.float32, SIZE, numba.intp)
    ),
}


def product(x: Array, panels: Array, scale: Array, bias: Array, step: float, inputs: int, outputs: int) -> Array:
    """x float32 [m, inputs] → x · panels · scale + bias, float32 [m, outputs]; scale, bias and step as there.

    Raises ValueError where x has another shape or dtype.
    """
    check_rows(x, inputs)
    out, x = np.empty((x.shape[0], outputs), np.float32), np.ascontiguousarray(x)
    for begin in range(0, len(x), AT_ONCE):
        part = x[begin : begin + AT_ONCE]
        threads = threads_used()
        size = task_rows(len(part), len(panels), threads), 1
        _kernel(out[begin : begin + AT_ONCE], part, panels, scale, bias, np.float32(step), size, threads)
    return out
