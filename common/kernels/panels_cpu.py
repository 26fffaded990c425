"""A product of few rows with a weight that oneDNN has laid out, compiled by numba.

Few rows wait for memory. oneDNN's product asks for a line of the weight when it comes to it; this one asks for the next
stretch while it computes with the last (docs/PERFORMANCE.md). A row's sums are taken in the same order whatever rows
are beside it.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.blocked import WIDTH, Array
from common.kernels import vectors_cpu
from common.kernels.jit import compiled
from common.kernels.vectors_cpu import FLOAT, LANES, LINE, add_products

_VECTORS = WIDTH // LANES
_STRETCH = 64
"""Inputs that all rows go through before the next: 16 KiB of a panel, half of most first-level caches."""
_TOGETHER = 4
"""Rows whose sums are kept in registers, with a panel's weights for one input."""


@numba.njit(inline="always")
def _add_rows(lines: Any, rows: Any, places: Any, count: Any) -> None:
    """`add_products` for any number of rows."""
    out, out_step, x, x_step, weights, coming = places
    for row in range(0, rows, _TOGETHER):
        here = (out + row * out_step, out_step, x + row * x_step, x_step, weights, coming)
        if rows - row >= _TOGETHER:
            add_products(_TOGETHER, _VECTORS, lines, here, count)
        elif rows - row == 3:
            add_products(3, _VECTORS, lines, here, count)
        elif rows - row == 2:
            add_products(2, _VECTORS, lines, here, count)
        else:
            add_products(1, _VECTORS, lines, here, count)
        coming += count * lines * LINE


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
            weights = panels.ctypes.data + (first * panels.shape[1] + stretch * _STRETCH * WIDTH) * FLOAT
            numbers = packed.ctypes.data + stretch * rows * _STRETCH * FLOAT
            coming = weights + _STRETCH * WIDTH * FLOAT
            places = (sums.ctypes.data, WIDTH * FLOAT, numbers, _STRETCH * FLOAT, weights, coming)
            if rows <= _TOGETHER:
                _add_rows(4, rows, places, count)
            elif rows <= 2 * _TOGETHER:
                _add_rows(2, rows, places, count)
            else:
                _add_rows(1, rows, places, count)
        for row in range(rows):
            for place in range(here):
                out[row, first + place] = sums[row, place] + bias[first + place] if len(bias) else sums[row, place]


_kernel = compiled(_product, made_of=vectors_cpu)


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
