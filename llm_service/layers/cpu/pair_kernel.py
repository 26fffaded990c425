"""Products of bfloat16 rows with a weight in panels of pairs (`llm_service.layers.cpu.pair_panels`), summed in float32,
compiled by numba for processors with AVX512-BF16; those with AMX use `common.cpu.tile_kernel`. The order of a row's
sums does not depend on the batch: docs/design/cpu-kernels.md."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import panel_tasks, phases, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.panel_tasks import SIZE, check_rows, product_work
from common.cpu.phases import counts_of
from common.cpu.routines import Routine, parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.products import ROWS
from common.cpu.vectors.stored import rounded
from common.cpu.weight_panels import VECTORS, WIDTH, first_line, write_panel
from llm_service.layers.cpu import panel_kernel
from llm_service.layers.cpu.panel_kernel import AT_ONCE, FEW, TOGETHER, add_rows, task_rows

_STORED = np.empty((0, 0, 0), np.uint64)
"""Of the type that pairs are stored in."""
_STRETCH = 64
"""Pairs of inputs that all rows go through before the next: 16 KiB of a panel, half of most first-level caches."""


@inner
def packed_rows(rows: Any, pairs: Any) -> Any:
    """Room for rows of so many pairs, uint32 [stretches, rows + 1, 64]: the last one is of zeros."""
    stretches = (pairs + _STRETCH - 1) // _STRETCH
    packed = np.empty((stretches, rows + 1, _STRETCH), np.uint32)
    for stretch in range(stretches):
        packed[stretch, rows] = np.uint32(0)
    return packed


@inner
def pack_pairs(packed: Any, row: Any, x: Any, source: Any) -> None:
    """Fills a row of packed with one of x [n, k], bits of float32 as uint32, rounded to the nearest bfloat16, halves to
    even, in pairs. NaN stays NaN."""
    inputs = x.shape[1]
    for stretch in range(packed.shape[0]):
        first = stretch * 2 * _STRETCH
        for pair in range(min(_STRETCH, (inputs - first) // 2)):
            low, high = x[source, first + 2 * pair], x[source, first + 2 * pair + 1]
            packed[stretch, row, pair] = rounded(low) >> np.uint32(16) | rounded(high) & np.uint32(0xFFFF0000)
    if inputs % 2:
        last = inputs // 2
        packed[last // _STRETCH, row, last % _STRETCH] = rounded(x[source, inputs - 1]) >> np.uint32(16)


def _sum_panel(sums: Any, numbers: Any, apart: Any, weights: Any, pairs: Any, rows: Any) -> None:
    """Adds a panel's products to float32 sums [rows, 64], all given by address: rows of numbers as `packed_rows` has
    them, with the bytes from one stretch of them to the next."""
    size = WIDTH * FLOAT
    for first in range(0, pairs, _STRETCH):
        count, here = min(_STRETCH, pairs - first), weights + first * size
        x = numbers + first // _STRETCH * apart
        places = (sums, WIDTH * FLOAT, x, _STRETCH * FLOAT, here, here + _STRETCH * size, size)
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
def sums_of(packed: Any, panels: Any, panel: Any, begin: Any, rows: Any) -> Any:
    """The sums of one panel and the rows [begin : begin + rows], float32 [rows, 64] from the first line of an array
    on."""
    pairs, apart = panels.shape[1], packed.shape[1] * _STRETCH * FLOAT
    room = np.zeros((rows + 1) * WIDTH + LANES, np.float32)
    sums = room.ctypes.data + first_line(room) * FLOAT
    numbers = packed.ctypes.data + begin * _STRETCH * FLOAT
    _sum((sums, numbers, apart, panels.ctypes.data + panel * pairs * WIDTH * FLOAT, pairs, rows))
    return room


@inner
def multiply(out: Any, packed: Any, panels: Any, bias: Any, panel: Any, begin: Any, rows: Any) -> None:
    """Fills out [begin : begin + rows] of one panel's outputs; the others are as in `_product`."""
    write_panel(out, panel, begin, rows, sums_of(packed, panels, panel, begin, rows), bias[:0], bias)


@numba.njit(inline="always")
def _pack(row: Any, given: Any) -> None:
    _, packed, x, _, _ = given
    pack_pairs(packed, row, x, row)


@numba.njit(inline="always")
def _multiply(task: Any, given: Any) -> None:
    (out, packed, _, panels, bias), (begin, rows, panel, _) = given, task
    multiply(out, packed, panels, bias, panel, begin, rows)


_work = product_work(_pack, _multiply)


def _product(out: Any, x: Any, panels: Any, bias: Any, size: Any, threads: Any) -> None:
    """Fills float32 out [m, outputs] from x [m, k], as bits, and panels as in `PairPanels`; bias is [outputs] or [0]. A
    task has `size` rows of one panel's outputs."""
    rows, packed = x.shape[0], packed_rows(x.shape[0], panels.shape[1])
    given = out, packed, x, panels, bias
    parallel_for(_work, (counts_of(2, threads), rows, panels.shape[0], size, given), threads)


_kernel = threaded(_product, [panel_tasks, phases, vectors, weight_panels, panel_kernel], [SUM])
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
TYPED = {
    "sum": Typed(SUM, ()),
    "product": Typed(_kernel, (_matrix, numba.uint32[:, ::1], numba.uint64[:, :, ::1], _vector, SIZE, numba.intp)),
}
_NONE = np.empty(0, np.float32)


def product(x: Array, panels: Array, bias: Array | None, inputs: int, outputs: int) -> Array:
    """x float32 [m, inputs] → x · panels + bias, float32 [m, outputs].

    Raises ValueError where x has another shape or dtype.
    """
    check_rows(x, inputs)
    out, bits = np.empty((x.shape[0], outputs), np.float32), np.ascontiguousarray(x).view(np.uint32)
    for begin in range(0, len(x), AT_ONCE):
        part = bits[begin : begin + AT_ONCE]
        threads = threads_used()
        size = task_rows(len(part), len(panels), threads), 1
        _kernel(out[begin : begin + AT_ONCE], part, panels, _NONE if bias is None else bias, size, threads)
    return out
