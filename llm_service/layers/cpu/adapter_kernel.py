"""What adapters add to a few rows, each of which may have another one, on a CPU in float32: one call of a kernel by
numba, where torch would need several products for each row. It waits for memory, so matrices are read in the order in
which they lie, and as short as they are stored."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import vectors
from common.cpu.jit import Typed, compiled, inner
from common.cpu.vectors.llvm import FLOAT
from common.cpu.vectors.products import add_products
from common.cpu.vectors.stored import lower_half, upper_half, widened_half
from llm_service.layers.cpu import panel_kernel
from llm_service.layers.cpu.panel_kernel import VECTORS, WIDTH

SINGLES, PAIRS, HALVES = 0, 1, 2
"""What the matrices of a slot are stored in: float32; bfloat16, two to a word; float16."""
_RANKS, _PANELS = 8, 8
"""What one task takes: rows of A, panels of B."""
_ZERO = np.float32(0.0)


@inner
def _dot(x: Any, a: Any) -> Any:
    """Of float32 [n] both."""
    total = _ZERO
    for place in range(x.shape[0]):
        total += a[place] * x[place]
    return total


@inner
def _dot_pairs(low: Any, high: Any, a: Any) -> Any:
    """Of float32 [n] twice with the lower and the upper halves of words, uint32 [n]."""
    total = _ZERO
    for place in range(a.shape[0]):
        total += lower_half(a[place]) * low[place] + upper_half(a[place]) * high[place]
    return total


@inner
def _dot_halves(x: Any, a: Any) -> Any:
    """Of float32 [n] with the bits of float16, uint16 [n]."""
    total = _ZERO
    for place in range(x.shape[0]):
        total += widened_half(a[place]) * x[place]
    return total


@inner
def _shrink(out: Any, x: Any, a: Any, kind: Any, first: Any, scale: Any) -> None:
    """float32 out [ranks], x [inputs]; a is a slot's, of which the rows from `first` on are wanted."""
    # Loops that begin at 0 are compiled to vectors; where one begins elsewhere, each index might be a negative one.
    inputs = x.shape[0]
    half = inputs // 2
    low, high = x[:half], x[half:]
    for row in range(out.shape[0]):
        at = first + row
        if kind == PAIRS:
            total = _dot_pairs(low, high, a[at * half : (at + 1) * half])
        elif kind == HALVES:
            total = _dot_halves(x, a.view(np.uint16)[at * inputs : (at + 1) * inputs])
        else:
            total = _dot(x, a.view(np.float32)[at * inputs : (at + 1) * inputs])
        out[row] = total * scale


@inner
def _add_panel(out: Any, x: Any, b: Any, kind: Any, panel: Any, apart: Any) -> None:
    """float32 out [at most 64] += x [ranks] times a panel; b is a slot's, whose panels are `apart` rows."""
    room = np.zeros(WIDTH if out.shape[0] < WIDTH else 0, np.float32)
    to = room.ctypes.data if len(room) else out.ctypes.data
    size = WIDTH * FLOAT if kind == SINGLES else WIDTH * FLOAT // 2
    weights, count = b.ctypes.data + panel * apart * size, x.shape[0]
    places = (to, 0, x.ctypes.data, 0, weights, weights + apart * size, size)
    if kind == PAIRS:
        add_products(1, VECTORS, VECTORS, 1, b, places, count)
    elif kind == HALVES:
        add_products(1, VECTORS, VECTORS, 1, b.view(np.uint16), places, count)
    else:
        add_products(1, VECTORS, VECTORS, 1, b.view(np.float32), places, count)
    for place in range(min(len(room), out.shape[0])):
        out[place] += room[place]


def _add(
    out: Any,
    x: Any,
    rank: Any,
    a: Any,
    b: Any,
    slots: Any,
    kinds: Any,
    ranks: Any,
    scales: Any,
    panels: Any,
) -> None:
    """float32 out [n, outputs], x [n, inputs]; the rank of slots; uint32 a and b [slots, words], as
    `LowRankPanels` has them; int64 slots [n], -1 for none, kinds [slots], ranks [slots, parts], panels [k, 3] of
    outputs: part, begin, end; float32 scales [slots, parts]."""
    parts = ranks.shape[1]
    between = np.empty((len(slots), parts, rank), np.float32)
    groups, pieces = (rank + _RANKS - 1) // _RANKS, (len(panels) + _PANELS - 1) // _PANELS
    for task in numba.prange(len(slots) * parts * groups):
        row, part, first = task // (parts * groups), task // groups % parts, task % groups * _RANKS
        slot = slots[row]
        last = min(first + _RANKS, ranks[slot, part]) if slot >= 0 else 0
        if first < last:
            place = between[row, part, first:last]
            _shrink(place, x[row], a[slot], kinds[slot], part * rank + first, scales[slot, part])
    for task in numba.prange(len(slots) * pieces):
        row, first = task // pieces, task % pieces * _PANELS
        slot = slots[row]
        for panel in range(first, min(first + _PANELS, len(panels)) if slot >= 0 else first):
            part, begin, end = panels[panel]
            own = ranks[slot, part]
            if own:
                _add_panel(out[row, begin:end], between[row, part, :own], b[slot], kinds[slot], panel, rank)


add = compiled(_add, made_of=[vectors, panel_kernel])
_rows, _words, _numbers = numba.float32[:, ::1], numba.uint32[:, ::1], numba.int64[:, ::1]
TYPED = {
    "add": Typed(
        add,
        (
            *(_rows, _rows, numba.intp, _words, _words),
            *(numba.int64[::1], numba.int64[::1], _numbers, _rows, _numbers),
        ),
    )
}
KERNELS = frozenset({f"{__name__}:add"})
