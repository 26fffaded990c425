"""Adds adapters to few rows, a different one for each if need be, on a CPU in float32: one call of a numba kernel,
where torch would need several products per row. Memory bounds it, so matrices are read in the order in which they lie,
in their stored dtype."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import vectors, weight_panels
from common.cpu.jit import Typed, inner
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.dots import add_dots, sum_of_lanes
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.products import NOTHING, add_products
from common.cpu.weight_panels import VECTORS, WIDTH, first_line

SINGLES, PAIRS, HALVES = 0, 1, 2
"""The dtype that a matrix is stored in: float32; bfloat16, two in a word; float16."""


@numba.njit(inline="always")
def _bytes(kind: Any, rank: Any) -> Any:
    """Of a panel."""
    return rank * WIDTH * (FLOAT if kind == SINGLES else FLOAT // 2)


@inner
def _shrink(between: Any, x: Any, stored: Any, weights: Any, size: Any, scale: Any) -> None:
    """float32 between [rank] = scale · A x, for x [inputs] and the panels of A at an address, with the bytes from one
    to the next; the dtype of `stored` is theirs."""
    rank, panels = len(between), len(x) // WIDTH
    room = np.zeros(rank * LANES + WIDTH + LANES, np.float32)
    first = first_line(room)
    sums = room.ctypes.data + first * FLOAT
    for panel in range(panels):
        add_dots(VECTORS, stored, (sums, x.ctypes.data + panel * WIDTH * FLOAT, weights + panel * size), rank)
    rest = len(x) - panels * WIDTH
    if rest:
        padded = room[first + rank * LANES :]
        for place in range(rest):
            padded[place] = x[panels * WIDTH + place]
        add_dots(VECTORS, stored, (sums, padded.ctypes.data, weights + panels * size), rank)
    for row in range(rank):
        between[row] = scale * sum_of_lanes(sums + row * LINE)


@inner
def _expand(out: Any, between: Any, stored: Any, weights: Any, size: Any, panels: Any) -> None:
    """float32 out [outputs] += B between [rank], for the panels of B at an address, with the bytes from one to the
    next; `panels` int64 [k, 3] are their outputs: part, begin, end."""
    rank = len(between)
    for panel in range(len(panels)):
        begin, end = panels[panel, 1], panels[panel, 2]
        if end - begin == WIDTH:
            places = (out.ctypes.data + begin * FLOAT, 0, between.ctypes.data, 0, weights, 0, 0)
            add_products(1, VECTORS, VECTORS, NOTHING, stored, places, rank)
        else:
            room = np.zeros(WIDTH, np.float32)
            places = (room.ctypes.data, 0, between.ctypes.data, 0, weights, 0, 0)
            add_products(1, VECTORS, VECTORS, NOTHING, stored, places, rank)
            for place in range(end - begin):
                out[begin + place] += room[place]
        weights += size


@inner
def _add_pair(out: Any, x: Any, words: Any, begin: Any, rank: Any, scale: Any, kinds: Any, panels: Any) -> None:
    """float32 out [outputs] += scale · B A x, for x [inputs] and a pair that begins at a byte of uint32 `words`: A's
    panels, then B's. `kinds` [2] are A's and B's; `panels` are (the part's [k, 3], first and end of the wanted)."""
    between = np.empty(rank, np.float32)
    halves, singles = words.view(np.uint16), words.view(np.float32)
    weights, size = words.ctypes.data + begin, _bytes(kinds[0], rank)
    if kinds[0] == PAIRS:
        _shrink(between, x, words, weights, size, scale)
    elif kinds[0] == HALVES:
        _shrink(between, x, halves, weights, size, scale)
    else:
        _shrink(between, x, singles, weights, size, scale)
    every, first, end = panels
    weights += (len(x) + WIDTH - 1) // WIDTH * size
    size = _bytes(kinds[1], rank)
    weights += first * size
    if kinds[1] == PAIRS:
        _expand(out, between, words, weights, size, every[first:end])
    elif kinds[1] == HALVES:
        _expand(out, between, halves, weights, size, every[first:end])
    else:
        _expand(out, between, singles, weights, size, every[first:end])


@inner
def _add_piece(task: Any, out: Any, x: Any, rows: Any, slots: Any, halves: Any, outputs: Any, pieces: Any) -> None:
    """A task of `_add`."""
    (words, begins, kinds, ranks, scales), (panels, firsts) = halves, outputs
    parts = ranks.shape[1]
    place, part, piece = task // (parts * pieces), task // pieces % parts, task % pieces
    row, slot = rows[place], slots[place]
    own = panels[firsts[part] : firsts[part + 1]]
    wanted = own, len(own) * piece // pieces, len(own) * (piece + 1) // pieces
    rank, scale = ranks[slot, part], scales[slot, part]
    if rank and wanted[1] < wanted[2]:
        _add_pair(out[row], x[row], words[slot], begins[slot, part], rank, scale, kinds[slot, part], wanted)


def _add(
    out: Any,
    x: Any,
    rows: Any,
    slots: Any,
    words: Any,
    begins: Any,
    kinds: Any,
    ranks: Any,
    scales: Any,
    panels: Any,
    firsts: Any,
    pieces: Any,
) -> None:
    """Adds to float32 out [n, outputs] what adapters make of x [n, inputs]: of int64 rows [m], by the adapter in each
    one's slot, int64 slots [m].

    Slots are as in `LowRankPanels`: uint32 words [slots, most] with a pair of matrices for each part of the outputs;
    int64 begins [slots, parts], the byte of the words where a pair begins; int64 kinds [slots, parts, 2], the dtypes of
    its matrices; int64 ranks and float32 scales [slots, parts]. The panels of outputs are int64 panels [k, 3]: part,
    begin, end; part p has those from firsts[p] up to firsts[p + 1].

    A task has a row, a part, and one of `pieces` pieces of the part's panels. Each piece computes again what A gives,
    which is cheaper than a wait of all threads in between."""
    given = out, x, rows, slots, (words, begins, kinds, ranks, scales), (panels, firsts), pieces
    parallel_for(_add_piece, given, len(rows) * ranks.shape[1] * pieces)


add = threaded(_add, [vectors, weight_panels])
_rows, _numbers, _list = numba.float32[:, ::1], numba.int64[:, ::1], numba.int64[::1]
_slots = (numba.uint32[:, ::1], _numbers, numba.int64[:, :, ::1], _numbers, _rows)
TYPED = {"add": Typed(add, (_rows, _rows, _list, _list, *_slots, _numbers, _list, numba.intp))}
KERNELS = frozenset({f"{__name__}:add"})
