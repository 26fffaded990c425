"""A product with a weight in panels (`llm_service.layers.cpu.panels`), compiled by numba: of one row or of thousands.
Few rows wait for memory, so weights are multiplied as they are stored; for many a stretch is made float32 first. A
row's sums are taken in the same order either way, to the bit: docs/design/cpu-kernels.md."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import llvm
from common.cpu.jit import Array, Typed, compiled, inner
from common.cpu.llvm import FLOAT, LANES, LINE, ROWS, add_products, widened_stretch

WIDTH = 64
"""Outputs of a panel, whose weights for one input lie side by side."""
_VECTORS = WIDTH // LANES
_STRETCH = 64
"""Inputs that all rows go through before the next: as float32, 16 KiB of a panel, half of most first-level caches."""
TOGETHER = 6
"""Rows whose sums are kept in registers, with a panel's weights for one input."""
FEW = 4 * TOGETHER
"""Rows up to which weights are made float32 anew for every six of them."""
_MOST = 84 * TOGETHER
"""Rows whose sums one task keeps at most: 126 KiB, in a second-level cache."""
AT_ONCE = 4 * _MOST
"""Rows that are computed in one go, since their numbers are put side by side first, which takes memory."""


@numba.njit(inline="always")
def add_rows(ahead: Any, stored: Any, rows: Any, places: Any, count: Any) -> None:
    """`add_products` for the rows from one on up to another, six at a time; where 5 are left it computes 6, for 3 it
    computes 4.

    The last of `places` are the address of the weights that come next, as they are stored, and bytes for each input.
    """
    out, out_step, x, x_step, weights, coming, size = places
    share = size // max(1, ahead)
    for row in range(rows[0], rows[1], TOGETHER):
        asked = coming + row // TOGETHER * count * share
        here = (out + row * out_step, out_step, x + row * x_step, x_step, weights, asked, share)
        left = rows[1] - row
        if left >= TOGETHER - 1:
            add_products(TOGETHER, _VECTORS, _VECTORS, ahead, stored, here, count)
        elif left >= 3:
            add_products(4, _VECTORS, _VECTORS, ahead, stored, here, count)
        elif left == 2:
            add_products(2, _VECTORS, _VECTORS, ahead, stored, here, count)
        else:
            add_products(1, _VECTORS, _VECTORS, ahead, stored, here, count)


@inner
def _pack_row(packed: Any, x: Any, row: Any) -> None:
    """float32 packed [stretches, m, 64], x [m, k]: a row's numbers by stretches, since as far apart as rows lie, they
    would push each other out of the cache."""
    inputs = x.shape[1]
    for stretch in range(packed.shape[0]):
        for place in range(min(_STRETCH, inputs - stretch * _STRETCH)):
            packed[stretch, row, place] = x[row, stretch * _STRETCH + place]


@inner
def _multiply(out: Any, packed: Any, panels: Any, scale: Any, bias: Any, panel: Any, begin: Any, rows: Any) -> None:
    """Fills out [begin : begin + rows] of one panel's outputs; the others are as in `_product`."""
    inputs, size = panels.shape[1], panels.shape[2] * panels.itemsize
    room = np.zeros((rows + 1 + (_STRETCH if rows > FEW else 0)) * WIDTH + LANES, np.float32)
    skipped = (-room.ctypes.data % LINE) // FLOAT
    sums = room.ctypes.data + skipped * FLOAT
    wide = sums + (rows + 1) * WIDTH * FLOAT
    for stretch in range(packed.shape[0]):
        first = stretch * _STRETCH
        count = min(_STRETCH, inputs - first)
        weights = panels.ctypes.data + (panel * inputs + first) * size
        coming = weights + _STRETCH * size
        numbers = packed.ctypes.data + (stretch * packed.shape[1] + begin) * _STRETCH * FLOAT
        if rows > FEW:
            weights = widened_stretch(_VECTORS, panels, wide, weights, count)
        places = (sums, WIDTH * FLOAT, numbers, _STRETCH * FLOAT, weights, coming, size)
        if rows <= TOGETHER:
            add_rows(1, panels, (0, rows), places, count)
        elif rows <= 3 * TOGETHER:
            add_rows(2, panels, (0, rows), places, count)
        elif rows <= FEW:
            add_rows(4, panels, (0, rows), places, count)
        else:
            add_rows(4, room, (0, FEW), places, count)
            add_rows(ROWS, room, (FEW, rows), places, count)
    first = panel * WIDTH
    for row in range(rows):
        for place in range(min(WIDTH, out.shape[1] - first)):
            total = room[skipped + row * WIDTH + place]
            if len(scale):
                total *= scale[first + place]
            out[begin + row, first + place] = total + bias[first + place] if len(bias) else total


def _product(out: Any, x: Any, panels: Any, scale: Any, bias: Any, most: Any) -> None:
    """float32 out [m, outputs], x [m, k], panels as in `PanelWeight`; scale and bias [outputs] or [0]. A task has
    `most` rows of a panel's outputs."""
    rows, inputs = x.shape
    stretches = (inputs + _STRETCH - 1) // _STRETCH
    packed = np.empty((stretches, rows + 1, _STRETCH), np.float32)
    for stretch in range(stretches):
        packed[stretch, rows] = np.float32(0.0)
    if rows <= FEW:
        for row in range(rows):
            _pack_row(packed, x, row)
    else:
        for row in numba.prange(rows):
            _pack_row(packed, x, row)
    parts = (rows + most - 1) // most
    for task in numba.prange(panels.shape[0] * parts):
        begin = np.intp(task) % parts * most
        _multiply(out, packed, panels, scale, bias, np.intp(task) // parts, begin, min(most, rows - begin))


_kernel = compiled(_product, made_of=llvm)
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
TYPED = {
    str(stored): Typed(_kernel, (_matrix, _matrix, stored[:, :, ::1], _vector, _vector, numba.intp))
    for stored in (numba.float32, numba.uint32, numba.uint16, numba.int8)
}
"""By the type of the panels' array."""
_NONE = np.empty(0, np.float32)


def product(x: Array, panels: Array, scale: Array | None, bias: Array | None, outputs: int) -> Array:
    """x float32 [m, inputs] → (x · panels) · scale + bias, float32 [m, outputs].

    Raises ValueError where x has another shape or type.
    """
    if x.ndim != 2 or x.shape[1] != panels.shape[1] or x.dtype != np.float32:
        raise ValueError(f"{x.dtype} {x.shape} does not fit a weight of {panels.shape[1]} inputs")
    out, x = np.empty((x.shape[0], outputs), np.float32), np.ascontiguousarray(x)
    given = [_NONE if each is None else each for each in (scale, bias)]
    for begin in range(0, len(x), AT_ONCE):
        part = x[begin : begin + AT_ONCE]
        most = task_rows(len(part), len(panels), numba.get_num_threads())
        _kernel(out[begin : begin + AT_ONCE], part, panels, *given, most)
    return out


def task_rows(rows: int, panels: int, threads: int) -> int:
    """Rows of a task: so many that each thread has two tasks or more, in full sets of what is computed together."""
    shared = -(-rows * panels // (2 * threads * TOGETHER)) * TOGETHER
    return min(_MOST, max(FEW, shared))
