"""A product with quantised weights in panels (`llm_service.layers.cpu.quantized_panels`), compiled by numba.

Few rows are multiplied with numbers as they are stored, and the sums of a group with its scale. For many, a stretch
of a panel is made float32 first, and rows go through it while it is in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from common.cpu import panel_tasks, phases, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.panel_tasks import SIZE, check_rows, product_work
from common.cpu.phases import counts_of
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.products import NOTHING, add_scaled, scaled_stretch, widened_stretch
from common.cpu.weight_panels import VECTORS, WIDTH, first_line, write_panel
from llm_service.layers.cpu import panel_kernel
from llm_service.layers.cpu.panel_kernel import AT_A_TIME, TILE, TOGETHER, add_few, add_tile, task_rows
from llm_service.layers.cpu.selection import wide_vectors

_STRETCH = 64
"""Inputs that all rows go through before the next: as float32, 16 KiB of a panel, half of most first-level caches."""
FEW = panel_kernel.FEW if wide_vectors() else AT_A_TIME
"""Rows that are multiplied with numbers as they are stored."""
_MOST = 84 * TOGETHER
"""The most rows whose sums one task holds: 126 KiB, in a second-level cache."""
_AT_ONCE = 4 * _MOST
"""Rows that are computed in one pass; they are packed first, which takes memory."""
FLOAT32, FLOAT16, BFLOAT16, E4M3, INT8, NIBBLES, E2M1 = range(7)
"""Storage formats of numbers and scales: see `QuantizedPanels`."""
_FLOAT16, _BFLOAT16, _E4M3 = np.empty(0, np.uint16), np.empty(0, np.int16), np.empty(0, np.uint8)
_INT8, _NIBBLES, _E2M1 = np.empty(0, np.int8), np.empty(0, np.int32), np.empty(0, np.int64)
"""The same as intrinsics know it, by an array's type."""


@numba.njit(inline="always")
def _add_few(form: Any, rows: Any, places: Any, count: Any) -> None:
    """The same of numbers in any form."""
    if form == E4M3:
        add_few(NOTHING, _E4M3, rows, places, count)
    elif form == INT8:
        add_few(NOTHING, _INT8, rows, places, count)
    elif form == NIBBLES:
        add_few(NOTHING, _NIBBLES, rows, places, count)
    else:
        add_few(NOTHING, _E2M1, rows, places, count)


@numba.njit(inline="always")
def _scale_stretch(form: Any, places: Any, constants: Any, count: Any) -> None:
    """`scaled_stretch` of numbers in any form."""
    if form == E4M3:
        scaled_stretch(VECTORS, TILE, _E4M3, places, constants, count)
    elif form == INT8:
        scaled_stretch(VECTORS, TILE, _INT8, places, constants, count)
    elif form == NIBBLES:
        scaled_stretch(VECTORS, TILE, _NIBBLES, places, constants, count)
    else:
        scaled_stretch(VECTORS, TILE, _E2M1, places, constants, count)


@numba.njit(inline="always")
def group_constants(room: Any, scale: Any, kind: Any, zero: Any, group: Any, panel: Any, panels: Any) -> Any:
    """The addresses of a group's scales and zeros, float32 [64] each, for the outputs of one of `panels` panels. What
    the weight has in another dtype is widened into `room`, an address with room for both; without zeros, the second
    half of it stays as it is."""
    place = scale.ctypes.data + group * scale.shape[1] + panel * (scale.shape[1] // panels)
    if kind == FLOAT16:
        place = widened_stretch(VECTORS, _FLOAT16, room, place, 1)
    elif kind == BFLOAT16:
        place = widened_stretch(VECTORS, _BFLOAT16, room, place, 1)
    elif kind == E4M3:
        place = widened_stretch(VECTORS, _E4M3, room, place, 1)
    if zero.shape[0]:
        row = group if zero.shape[0] > 1 else 0
        zeros = zero.ctypes.data + row * zero.shape[1] + panel * WIDTH
        widened_stretch(VECTORS, zero, room + WIDTH * FLOAT, zeros, 1)
    return place, room + WIDTH * FLOAT


@inner
def _few(out: Any, packed: Any, sums: Any, weight: Any, bias: Any, ends: Any, panel: Any) -> None:
    """Fills one panel's outputs of out [rows, outputs]; sums float32 [rows, groups] are those of x."""
    codes, form, scale, kind, zero, unit = weight
    rows, inputs, size = out.shape[0], codes.shape[1], codes.shape[2]
    room = np.zeros(2 * (rows + TOGETHER + 1) * WIDTH + LANES, np.float32)
    totals = room.ctypes.data + first_line(room) * FLOAT
    parts = totals + (rows + TOGETHER) * WIDTH * FLOAT
    both = parts + (rows + TOGETHER) * WIDTH * FLOAT
    numbers = codes.ctypes.data + panel * inputs * size
    group = begin = 0
    while begin < inputs:
        stretch = begin // _STRETCH
        end = min(ends[group], (stretch + 1) * _STRETCH)
        x = packed.ctypes.data + (stretch * packed.shape[1] * _STRETCH + begin - stretch * _STRETCH) * FLOAT
        for row in range(0, rows, AT_A_TIME):
            out_at, x_at = parts + row * WIDTH * FLOAT, x + row * _STRETCH * FLOAT
            places = (out_at, WIDTH * FLOAT, x_at, _STRETCH * FLOAT, numbers + begin * size, numbers, size)
            _add_few(form, min(AT_A_TIME, rows - row), places, end - begin)
        if end == ends[group]:
            scales, zeros = group_constants(both, scale, kind, zero, group, panel, codes.shape[0])
            for row in range(rows):
                of_x = sums[row, group] if zero.shape[0] else np.float32(0.0)
                add_scaled(VECTORS, (totals, parts, scales, zeros), row * WIDTH * FLOAT, of_x)
            group += 1
        begin = end
    write_panel(out, panel, 0, rows, room, unit, bias)


@inner
def _many(out: Any, packed: Any, weight: Any, bias: Any, ends: Any, panel: Any, first: Any) -> None:
    """Fills one panel's outputs of out [rows, outputs], which are the rows of `packed` from the first on."""
    codes, form, scale, kind, zero, unit = weight
    rows, inputs, size = out.shape[0], codes.shape[1], codes.shape[2]
    room = np.zeros((rows + 1 + _STRETCH + 2) * WIDTH + LANES, np.float32)
    totals = room.ctypes.data + first_line(room) * FLOAT
    wide = totals + (rows + 1) * WIDTH * FLOAT
    both = wide + _STRETCH * WIDTH * FLOAT
    numbers = codes.ctypes.data + panel * inputs * size
    apart = _STRETCH * TILE * LINE
    group = 0
    constants = group_constants(both, scale, kind, zero, 0, panel, codes.shape[0])
    for stretch in range(packed.shape[0]):
        begin, last = stretch * _STRETCH, min(inputs, (stretch + 1) * _STRETCH)
        while begin < last:
            end = min(ends[group], last)
            to = wide + (begin - stretch * _STRETCH) * TILE * LINE
            _scale_stretch(form, (to, apart, numbers + begin * size), constants, end - begin)
            if end == ends[group] and end < inputs:
                group += 1
                constants = group_constants(both, scale, kind, zero, group, panel, codes.shape[0])
            begin = end
        x = packed.ctypes.data + (stretch * packed.shape[1] + first) * _STRETCH * FLOAT
        for tile in range(VECTORS // TILE):
            to = totals + tile * TILE * LINE
            places = (to, WIDTH * FLOAT, x, _STRETCH * FLOAT, wide + tile * apart, numbers + last * size, size)
            add_tile(tile, TILE, TILE, room, rows, places, last - stretch * _STRETCH)
    write_panel(out, panel, 0, rows, room, unit, bias)


@inner
def _pack(row: Any, given: Any) -> None:
    """Packs a row of x [m, k] into float32 packed [stretches, m, 64], in `order` if there is one; and sums its groups
    into sums [m, groups], or [m, 0] where they are not needed."""
    _, packed, sums, x, _, _, (ends, order) = given
    inputs = x.shape[1]
    for stretch in range(packed.shape[0]):
        begin = stretch * _STRETCH
        for place in range(min(_STRETCH, inputs - begin)):
            packed[stretch, row, place] = x[row, order[begin + place] if len(order) else begin + place]
    begin = 0
    for group in range(sums.shape[1]):
        total = np.float32(0.0)
        for place in range(begin, ends[group]):
            total += x[row, order[place] if len(order) else place]
        sums[row, group] = total
        begin = ends[group]


@inner
def _multiply(task: Any, given: Any) -> None:
    """Fills a task's part of out, in one panel."""
    out, packed, sums, x, weight, bias, (ends, _) = given
    begin, rows, panel, _ = task
    if x.shape[0] <= FEW:
        _few(out, packed, sums, weight, bias, ends, panel)
    else:
        _many(out[begin : begin + rows], packed, weight, bias, ends, panel, begin)


_work = product_work(_pack, _multiply)


def _product(out: Any, x: Any, weight: Any, bias: Any, groups: Any, size: Any, threads: Any) -> None:
    """Fills float32 out [m, outputs] from x [m, k]. The weight is as in `Weight`, groups are `ends` and `order` of
    `QuantizedPanels`, bias is [outputs] or [0]. A task has `size` rows of one panel's outputs."""
    (rows, inputs), panels, zero = x.shape, weight[0].shape[0], weight[4]
    stretches = (inputs + _STRETCH - 1) // _STRETCH
    packed = np.empty((stretches, rows + TOGETHER, _STRETCH), np.float32)
    sums = np.empty((rows, len(groups[0]) if zero.shape[0] and rows <= FEW else 0), np.float32)
    given = out, packed, sums, x, weight, bias, groups
    parallel_for(_work, (counts_of(2, threads), rows, panels, size, given), threads)


def typed(kernel: Any, kind: Any) -> Typed:
    """A kernel with the types of `_product`, x of this dtype."""
    bits, vector, places = numba.uint8[:, :, ::1], numba.float32[::1], numba.int32[::1]
    weight = numba.types.Tuple((bits, numba.intp, numba.uint8[:, ::1], numba.intp, numba.int8[:, ::1], vector))
    groups = numba.types.UniTuple(places, 2)
    return Typed(kernel, (numba.float32[:, ::1], kind[:, ::1], weight, vector, groups, SIZE, numba.intp))


_kernel = threaded(_product, [panel_tasks, phases, vectors, weight_panels, panel_kernel])
TYPED = {"product": typed(_kernel, numba.float32)}
_NONE = np.empty(0, np.float32)
Weight = tuple[Array, int, Array, int, Array, Array]
"""codes, form, scale, kind, zero and unit, as in `QuantizedPanels`."""


def product(x: Array, weight: Weight, groups: tuple[Array, Array], bias: Array | None, outputs: int) -> Array:
    """x float32 [m, inputs] → x Wᵀ + bias, float32 [m, outputs]; groups are `ends` and `order`.

    Raises ValueError where x has another shape or type.
    """
    return in_passes(_kernel, np.float32, _AT_ONCE, x, weight, groups, bias, outputs, rows_of_task)


def rows_of_task(rows: int, panels: int, threads: int) -> tuple[int, int]:
    """Rows of a task, which has one panel."""
    return task_rows(rows, panels, threads), 1


def in_passes(
    kernel: Callable[..., None],
    kind: type[np.generic],
    at_once: int,
    x: Array,
    weight: Weight,
    groups: tuple[Array, Array],
    bias: Array | None,
    outputs: int,
    size_of: Callable[[int, int, int], tuple[int, int]],
) -> Array:
    """See `product`: computes `at_once` rows per pass with a kernel that takes x as this dtype. `size_of` gives a
    task's rows and panels, for the numbers of rows, panels and threads."""
    codes = weight[0]
    check_rows(x, codes.shape[1])
    out, numbers = np.empty((len(x), outputs), np.float32), np.ascontiguousarray(x).view(kind)
    for begin in range(0, len(x), at_once):
        part = numbers[begin : begin + at_once]
        threads = threads_used()
        size = size_of(len(part), len(codes), threads)
        kernel(out[begin : begin + at_once], part, weight, _NONE if bias is None else bias, groups, size, threads)
    return out
