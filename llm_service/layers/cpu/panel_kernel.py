"""A product with a weight in panels (`llm_service.layers.cpu.panels`), compiled by numba: of one row or of thousands.
Few rows wait for memory, so weights are multiplied as they are stored; for many a stretch is made float32 first. A
row's sums are taken in the same order either way, to the bit: docs/design/cpu-kernels.md."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from common.cpu import panel_tasks, phases, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.panel_tasks import SIZE, check_rows, product_work
from common.cpu.phases import counts_of
from common.cpu.routines import Routine, parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.products import NOTHING, ROWS, add_products, in_pairs, widened_stretch
from common.cpu.vectors.stored import HALF_LINES
from common.cpu.weight_panels import VECTORS, WIDTH, first_line, write_panel
from llm_service.layers.cpu.selection import wide_vectors

_HALF = VECTORS // 2
_STRETCH = 64
"""Inputs that all rows go through before the next: as float32, 16 KiB of a panel, half of most first-level caches."""
_BYTES: dict[type[np.generic], int] = {np.float32: 4, np.uint32: 2, np.uint16: 2, np.int8: 1}
"""Of a number, by the type of the panels' array."""
TOGETHER = 6
"""Rows whose sums with a tile of outputs are kept in registers."""
WIDE = wide_vectors()
TILE = VECTORS if WIDE else 1
"""Vectors of outputs in a tile. Processors without AVX-512 have 16 registers of half the size instead of 32."""
_FOURS = TOGETHER if WIDE else 8
"""Where so many rows are left over, they go by fours. With one vector of sums per row, one or two rows wait for their
own sums as long as four take."""
AT_A_TIME = TOGETHER if WIDE else 3
"""Rows that are multiplied with weights as they are stored, before the next rows are."""
FEW = 4 * AT_A_TIME if WIDE else AT_A_TIME
"""Rows that are multiplied so."""
_ASKING = 2 * TOGETHER
"""If there are more rows, so many of them prefetch the next weights."""
_LEAST, _MOST = 4 * TOGETHER, 84 * TOGETHER
"""Rows of a task: the sums of the most are 126 KiB, in a second-level cache."""
AT_ONCE = 4 * _MOST
"""Rows that are computed in one pass; they are packed first, which takes memory."""


@numba.njit(inline="always")
def add_rows(tile: Any, across: Any, ahead: Any, stored: Any, rows: Any, places: Any, count: Any) -> None:
    """`add_products` of a tile of weights, `across` vectors per input, for a range of rows, six at a time; for 5 left
    over it computes 6, for 3 it computes 4.

    The last of `places` are the address of the next weights, as they are stored, and the bytes for each input, which
    `ahead` turns of rows share.
    """
    out, out_step, x, x_step, weights, coming, size = places
    share = size // max(1, ahead)
    row, asked = rows[0], coming
    while row < rows[1]:
        here = (out + row * out_step, out_step, x + row * x_step, x_step, weights, asked, share)
        left = rows[1] - row
        asked += count * share
        if left > _FOURS or TOGETHER - 1 <= left <= TOGETHER:
            add_products(TOGETHER, tile, across, ahead, stored, here, count)
            row += TOGETHER
        elif left >= 3:
            add_products(4, tile, across, ahead, stored, here, count)
            row += 4
        elif left == 2:
            add_products(2, tile, across, ahead, stored, here, count)
            row += 2
        else:
            add_products(1, tile, across, ahead, stored, here, count)
            row += 1


@numba.njit(inline="always")
def _add_few_wide(ahead: Any, stored: Any, rows: Any, places: Any, count: Any) -> None:
    """`add_products` of a panel as it is stored, for up to `AT_A_TIME` rows; `places` as in `add_rows`."""
    add_rows(VECTORS, VECTORS, ahead, stored, (0, rows), places, count)


@numba.njit(inline="always")
def _add_few_narrow(ahead: Any, stored: Any, rows: Any, places: Any, count: Any) -> None:
    """The same without AVX-512: half a panel at a time if there are several rows."""
    if rows == 1:
        add_products(1, VECTORS, VECTORS, ahead, stored, places, count)
        return
    out, out_step, x, x_step, weights, coming, size = places
    half = size // 2
    for part in range(2):
        to, asked = out + part * (WIDTH * FLOAT // 2), coming + part * half * count
        here = (to, out_step, x, x_step, weights + part * half, asked, half)
        if rows == 2:
            add_products(2, _HALF, VECTORS, ahead, stored, here, count)
        else:
            add_products(3, _HALF, VECTORS, ahead, stored, here, count)


add_few = _add_few_wide if WIDE else _add_few_narrow


@numba.njit(inline="always")
def add_tile(tile: Any, vectors: Any, across: Any, stored: Any, rows: Any, places: Any, count: Any) -> None:
    """`add_products` of all rows with one tile of a panel's weights. Each of the first turns of rows prefetches a part
    of the next weights: memory takes as long to deliver them as the products of eight rows take, and prefetching all at
    once would stall. `places` as in `add_rows`, `coming` for the whole panel."""
    out, out_step, x, x_step, weights, coming, size = places
    part = size * TILE // VECTORS
    asked = coming + tile * part * count
    here = (out, out_step, x, x_step, weights, asked, part * VECTORS if rows <= TOGETHER else part * VECTORS // 2)
    add_rows(vectors, across, VECTORS, stored, (0, min(_ASKING, rows)), here, count)
    add_rows(vectors, across, NOTHING, stored, (_ASKING, rows), here, count)


@numba.njit(inline="always")
def _add_panel_wide(stored: Any, room: Any, rows: Any, places: Any, count: Any) -> None:
    """A panel's products with all rows. `places` as in `add_rows`; the weights are float32 if there are more than `FEW`
    rows, otherwise as they are stored."""
    if rows <= TOGETHER:
        add_rows(VECTORS, VECTORS, 1, stored, (0, rows), places, count)
    elif rows <= 3 * TOGETHER:
        add_rows(VECTORS, VECTORS, 2, stored, (0, rows), places, count)
    elif rows <= FEW:
        add_rows(VECTORS, VECTORS, 4, stored, (0, rows), places, count)
    else:
        add_rows(VECTORS, VECTORS, 4, room, (0, FEW), places, count)
        add_rows(VECTORS, VECTORS, ROWS, room, (FEW, rows), places, count)


@numba.njit(inline="always")
def _add_panel_narrow(stored: Any, room: Any, rows: Any, places: Any, count: Any) -> None:
    """The same without AVX-512."""
    if rows <= FEW:
        add_few(1, stored, rows, places, count)
        return
    out, out_step, x, x_step, weights, coming, size = places
    if in_pairs(stored):
        for tile in range(VECTORS):
            half = tile % 2 * (LINE // 2)
            here = (out + tile // 2 * 2 * LINE + half, out_step, x, x_step, weights + tile * (LINE // 2), coming, size)
            add_tile(tile, HALF_LINES, VECTORS, stored, rows, here, count)
    else:
        for tile in range(VECTORS):
            here = (out + tile * LINE, out_step, x, x_step, weights + tile * LINE, coming, size)
            add_tile(tile, TILE, VECTORS, room, rows, here, count)


_add_panel = _add_panel_wide if WIDE else _add_panel_narrow


@inner
def packed_rows(rows: Any, inputs: Any) -> Any:
    """Room for rows of so many numbers, float32 [stretches, rows + 1, 64]: the last one is of zeros. They lie by
    stretches, since as far apart as rows lie, they would push each other out of the cache."""
    stretches = (inputs + _STRETCH - 1) // _STRETCH
    packed = np.empty((stretches, rows + 1, _STRETCH), np.float32)
    for stretch in range(stretches):
        packed[stretch, rows] = np.float32(0.0)
    return packed


@inner
def pack_row(packed: Any, row: Any, x: Any, source: Any) -> None:
    """Fills a row of packed with one of x [n, k]."""
    inputs = x.shape[1]
    for stretch in range(packed.shape[0]):
        for place in range(min(_STRETCH, inputs - stretch * _STRETCH)):
            packed[stretch, row, place] = x[source, stretch * _STRETCH + place]


def _summing(kind: type[np.generic]) -> Routine:
    """The routine that sums the products of a panel of this dtype."""
    stored, room = np.empty((0, 0, 0), kind), np.empty(0, np.float32)
    size = WIDTH * _BYTES[kind]

    def sum_panel(sums: Any, wide: Any, numbers: Any, apart: Any, weights: Any, inputs: Any, rows: Any) -> None:
        """Adds a panel's products to float32 sums [rows, 64], all given by address: rows of numbers as `packed_rows`
        has them, with the bytes from one stretch of them to the next; at `wide` there is room for the weights of a
        stretch."""
        for first in range(0, inputs, _STRETCH):
            count, here = min(_STRETCH, inputs - first), weights + first * size
            coming, x = here + _STRETCH * size, numbers + first // _STRETCH * apart
            if rows > FEW and (WIDE or not in_pairs(stored)):
                here = widened_stretch(VECTORS, stored, wide, here, count)
            places = (sums, WIDTH * FLOAT, x, _STRETCH * FLOAT, here, coming, size)
            _add_panel(stored, room, rows, places, count)

    return Routine(sum_panel, made_of=[vectors, weight_panels], mark=kind.__name__)


SUMS = {np.dtype(kind): _summing(kind) for kind in _BYTES}
_SUMS = {numba.from_dtype(kind): routine.call for kind, routine in SUMS.items()}


def _sum(panels: Any, given: Any) -> None:
    """Calls the routine for these panels."""
    raise NotImplementedError


@overload(_sum, strict=False)
def _sum_of(panels: Any, given: Any) -> Any:  # noqa: ARG001 - numba asks by names
    add_up = _SUMS[panels.dtype]
    return lambda panels, given: add_up(given)  # noqa: ARG005


@inner
def sums_of(packed: Any, panels: Any, panel: Any, begin: Any, rows: Any) -> Any:
    """The sums of one panel and the rows [begin : begin + rows], float32 [rows, 64] from the first line of an array
    on, not scaled."""
    inputs, size = panels.shape[1], panels.shape[2] * panels.itemsize
    room = np.zeros((rows + 1 + (_STRETCH if rows > FEW else 0)) * WIDTH + LANES, np.float32)
    sums = room.ctypes.data + first_line(room) * FLOAT
    numbers, apart = packed.ctypes.data + begin * _STRETCH * FLOAT, packed.shape[1] * _STRETCH * FLOAT
    wide, weights = sums + (rows + 1) * WIDTH * FLOAT, panels.ctypes.data + panel * inputs * size
    _sum(panels, (sums, wide, numbers, apart, weights, inputs, rows))
    return room


@inner
def multiply(out: Any, packed: Any, panels: Any, scale: Any, bias: Any, panel: Any, begin: Any, rows: Any) -> None:
    """Fills out [begin : begin + rows] of one panel's outputs; the others are as in `_product`."""
    write_panel(out, panel, begin, rows, sums_of(packed, panels, panel, begin, rows), scale, bias)


@numba.njit(inline="always")
def _pack(row: Any, given: Any) -> None:
    _, packed, x, _, _, _ = given
    pack_row(packed, row, x, row)


@numba.njit(inline="always")
def _multiply(task: Any, given: Any) -> None:
    (out, packed, _, panels, scale, bias), (begin, rows, panel, _) = given, task
    multiply(out, packed, panels, scale, bias, panel, begin, rows)


_work = product_work(_pack, _multiply)


def _product(out: Any, x: Any, panels: Any, scale: Any, bias: Any, size: Any, threads: Any) -> None:
    """Fills float32 out [m, outputs] from x [m, k] and panels as in `PanelWeight`; scale and bias are [outputs] or [0].
    A task has `size` rows of one panel's outputs."""
    rows, packed = x.shape[0], packed_rows(x.shape[0], x.shape[1])
    given = out, packed, x, panels, scale, bias
    parallel_for(_work, (counts_of(2, threads), rows, panels.shape[0], size, given), threads)


_kernels = {
    kind: threaded(_product, [panel_tasks, phases, vectors, weight_panels], [routine]) for kind, routine in SUMS.items()
}
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
TYPED = {
    str(kind): Typed(kernel, (_matrix, _matrix, numba.from_dtype(kind)[:, :, ::1], _vector, _vector, SIZE, numba.intp))
    for kind, kernel in _kernels.items()
}
"""By the type of the panels' array."""
_NONE = np.empty(0, np.float32)


def product(x: Array, panels: Array, scale: Array | None, bias: Array | None, outputs: int) -> Array:
    """x float32 [m, inputs] → (x · panels) · scale + bias, float32 [m, outputs].

    Raises ValueError where x has another shape or dtype.
    """
    check_rows(x, panels.shape[1])
    out, x = np.empty((x.shape[0], outputs), np.float32), np.ascontiguousarray(x)
    given = [_NONE if each is None else each for each in (scale, bias)]
    for begin in range(0, len(x), AT_ONCE):
        part = x[begin : begin + AT_ONCE]
        threads = threads_used()
        size = task_rows(len(part), len(panels), threads), 1
        _kernels[panels.dtype](out[begin : begin + AT_ONCE], part, panels, *given, size, threads)
    return out


def task_rows(rows: int, panels: int, threads: int) -> int:
    """Rows of a task: so many that each thread has two tasks or more, in full sets of rows that are computed
    together."""
    shared = -(-rows * panels // (2 * threads * TOGETHER)) * TOGETHER
    return min(_MOST, max(_LEAST, shared))
