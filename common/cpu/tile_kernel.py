"""Products of bfloat16 rows with a weight in panels of pairs (`common.cpu.weight_panels`) by tiles, summed in float32,
compiled by numba for processors with AMX. The order of a row's sums does not depend on the batch:
docs/design/cpu-kernels.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from common.cpu import panel_tasks, phases, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.panel_tasks import SIZE, check_rows, product_work
from common.cpu.phases import counts_of, first_of
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.claims import ask_lines
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.stored import rounded
from common.cpu.vectors.tiles import BLOCK, add_tiles, configure_tiles, multiply_tiles, release_tiles, round_row
from common.cpu.weight_panels import VECTORS, WIDTH, first_line, write_panel

ROW = WIDTH * FLOAT
"""Bytes of a pair's weights, or of a row's sums."""
_LINES = BLOCK * ROW // LINE
"""Lines that the weights of 16 pairs are."""
_HALF = VECTORS // 2
_STRETCH = 64
"""Pairs of inputs that all rows go through before the next: 16 KiB of a panel, so that the stretch that comes next has
room in the first-level cache as well."""
_AHEAD = 32
"""How many pairs ahead weights are prefetched for few rows."""
_LEAST_LINES = 8
"""Cache lines to prefetch with each 16 pairs, as long as there are any."""
MOST = 32 * BLOCK
"""Rows of a task at most: a stretch of them and their sums with `TOGETHER` panels are five eighths of a MiB, in a
second-level cache."""
TOGETHER = 4
"""Panels of a task whose rows do not fit into the cache: each stretch of rows is read once for all of them."""
KEPT = 1 << 19
"""Bytes of rows that do."""
AT_ONCE = 4 * MOST
"""Rows that are computed in one pass; they are packed first, which takes memory."""
_ASKED = 512
"""Lines of the weights of its next phase that a thread asks for before it waits for the others."""


@inner
def padded(rows: Any) -> Any:
    """Rows of whole blocks."""
    return (rows + BLOCK - 1) // BLOCK * BLOCK


@inner
def packed_rows(rows: Any, steps: Any) -> Any:
    """Room for rows of so many times 16 pairs, uint32 [m, words], in whole blocks; those beyond `rows` are zeros. Each
    begins with a line, an odd number of lines after the one before, so that they share no place of a cache."""
    every, wide = padded(rows), (steps | 1) * LANES
    room = np.empty(every * wide + LANES, np.uint32)
    packed = room[first_line(room) : first_line(room) + every * wide].reshape(every, wide)
    packed[rows:] = np.uint32(0)
    return packed


@inner
def pack_pairs(packed: Any, row: Any, x: Any, source: Any) -> None:
    """Fills a row of uint32 packed [m, words] with one of x [n, k], bits of float32, rounded to the nearest bfloat16,
    halves to even, in pairs. NaN stays NaN. The rest is zeros."""
    inputs = x.shape[1]
    whole = inputs // (2 * LANES)
    if whole:
        round_row(packed.ctypes.data + row * packed.shape[1] * FLOAT, x.ctypes.data + source * inputs * FLOAT, whole)
    for pair in range(whole * LANES, packed.shape[1]):
        word = np.uint32(0)
        if 2 * pair < inputs:
            word = rounded(x[source, 2 * pair]) >> np.uint32(16)
        if 2 * pair + 1 < inputs:
            word |= rounded(x[source, 2 * pair + 1]) & np.uint32(0xFFFF0000)
        packed[row, pair] = word


class TileSums(NamedTuple):
    """Routines that sum products by tiles: see `summing`."""

    add_blocks: Any
    sum_few: Any
    sum_many: Any


def summing(multiply: Any, add: Any) -> TileSums:
    """Parts of kernels that add up products by these two of `common.cpu.vectors.tiles`, to sums that begin at 0 and to
    others."""

    @inner
    def add_blocks(fresh: Any, rows: Any, places: Any, count: Any, most: Any) -> None:
        """Products of whole blocks of rows with a stretch of a panel: two blocks at a time with half of the outputs,
        then with the other half; `places` as in `add_tiles`. Sums start at 0 if `fresh`. The first blocks prefetch what
        comes next, with each 16 pairs at most the given number of lines."""
        out, out_step, x, x_step, weights, size, coming = places
        turns = (rows + BLOCK) // (2 * BLOCK)
        share, end = max(_LEAST_LINES, most // (2 * turns)), coming + count * most * LINE
        for row in range(0, rows, 2 * BLOCK):
            lines = share if coming < end else 0
            out_at, x_at = out + row * out_step, x + row * x_step
            if row + BLOCK == rows:
                here = (out_at, out_step, x_at, x_step, weights, size, coming)
                if fresh:
                    multiply(1, VECTORS, 2 * lines, here, count)
                else:
                    add(1, VECTORS, 2 * lines, here, count)
                break
            for half in range(0, ROW, ROW // 2):
                here = (out_at + half, out_step, x_at, x_step, weights + half, size, coming)
                if fresh:
                    multiply(2, _HALF, lines, here, count)
                else:
                    add(2, _HALF, lines, here, count)
                coming += lines * count * LINE

    @inner
    def sum_few(room: Any, packed: Any, panels: Any, panel: Any, rows: Any) -> None:
        """The sums of one panel, float32 [rows, 64] from the first line of `room` on, with at most one block of rows,
        the first of `packed`: they stay in tiles."""
        pairs = panels.shape[1]
        sums = room.ctypes.data + first_line(room) * FLOAT
        weights = panels.ctypes.data + panel * pairs * ROW
        configure_tiles(rows)
        places = (sums, ROW, packed.ctypes.data, packed.shape[1] * FLOAT, weights, ROW, weights + _AHEAD * ROW)
        multiply(1, VECTORS, _LINES, places, pairs // BLOCK)
        release_tiles()

    @inner
    def sum_many(room: Any, packed: Any, panels: Any, chosen: Any, begin: Any, rows: Any) -> None:
        """The sums of some panels, one after the other, float32 [padded rows, 64] each, from the first line of `room`
        on, with rows [begin : begin + rows] of `packed`. `chosen` are (first, count, apart): if `apart` is 0, the
        panels are adjacent; otherwise the second half of an even number of panels begins `apart` panels behind the
        first half."""
        first, count, apart = chosen
        pairs, step, half = panels.shape[1], packed.shape[1] * FLOAT, count // 2 if apart else count
        size = padded(rows)
        sums = room.ctypes.data + first_line(room) * FLOAT
        configure_tiles(BLOCK)
        for at in range(0, pairs, _STRETCH):
            x = packed.ctypes.data + begin * step + at * FLOAT
            for index in range(count):
                panel = first + index if index < half else first + apart + index - half
                following = panel * pairs + at + pairs
                if index + 1 == count:
                    following = first * pairs + at + _STRETCH
                elif index + 1 == half:
                    following = (first + apart) * pairs + at
                weights, coming = panels.ctypes.data + (panel * pairs + at) * ROW, panels.ctypes.data + following * ROW
                places = (sums + index * size * ROW, ROW, x, step, weights, ROW, coming)
                add_blocks(at == 0, size, places, min(_STRETCH, pairs - at) // BLOCK, _LINES)
        release_tiles()

    return TileSums(add_blocks, sum_few, sum_many)


add_blocks, sum_few, sum_many = summing(multiply_tiles, add_tiles)


@inner
def room_for(rows: Any, panels: Any) -> Any:
    """Memory for the sums of `rows` rows with `panels` panels."""
    return np.empty(padded(rows) * panels * WIDTH + LANES, np.float32)


@inner
def multiply(out: Any, packed: Any, panels: Any, bias: Any, first: Any, last: Any, begin: Any, rows: Any) -> None:
    """Fills out [begin : begin + rows] of the outputs of some panels, from one on up to another; the others are as in
    `_product`."""
    room = room_for(rows, last - first)
    if packed.shape[0] <= BLOCK:
        for panel in range(first, last):
            sum_few(room, packed, panels, panel, rows)
            write_panel(out, panel, 0, rows, room, bias[:0], bias)
        return
    sum_many(room, packed, panels, (first, last - first, 0), begin, rows)
    for panel in range(first, last):
        write_panel(out, panel, begin, rows, room[(panel - first) * padded(rows) * WIDTH :], bias[:0], bias)


@inner
def ask_share(counts: Any, thread: Any, panels: Any) -> None:
    """Has the first weights of a thread's share fetched."""
    size = panels.shape[1] * panels.shape[2] * panels.itemsize
    first = first_of(thread, counts.shape[1] - 1, panels.shape[0])
    ask_lines(panels.ctypes.data + first * size, min(_ASKED, size // LINE))


@inner
def _pack(row: Any, given: Any) -> None:
    _, packed, x, _, _ = given
    pack_pairs(packed, row, x, row)


@inner
def _multiply(task: Any, given: Any) -> None:
    (out, packed, _, panels, bias), (begin, rows, first, count) = given, task
    multiply(out, packed, panels, bias, first, first + count, begin, rows)


_take_all = product_work(_pack, _multiply)


@inner
def _work(thread: Any, counts: Any, rows: Any, panels: Any, size: Any, given: Any) -> None:
    """One thread's part of `_product`."""
    ask_share(counts, thread, given[3])
    _take_all(thread, counts, rows, panels, size, given)


def _product(out: Any, x: Any, panels: Any, bias: Any, size: Any, threads: Any) -> None:
    """Fills float32 out [m, outputs] from x [m, k], as bits, and panels as `panels_of_pairs` lays them out; bias is
    [outputs] or [0]. A task has `size` rows and panels."""
    rows, packed = x.shape[0], packed_rows(x.shape[0], panels.shape[1] // BLOCK)
    given = out, packed, x, panels, bias
    parallel_for(_work, (counts_of(2, threads), rows, panels.shape[0], size, given), threads)


_kernel = threaded(_product, [vectors, panel_tasks, phases, weight_panels])
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
TYPED = {"product": Typed(_kernel, (_matrix, numba.uint32[:, ::1], numba.uint64[:, :, ::1], _vector, SIZE, numba.intp))}
_NONE = np.empty(0, np.float32)


def product(x: Array, panels: Array, bias: Array | None, inputs: int, outputs: int) -> Array:
    """x float32 [m, inputs] → x · panels + bias, float32 [m, outputs].

    Raises ValueError where x has another shape or dtype.
    """
    check_rows(x, inputs)
    out: Array = torch.empty((x.shape[0], outputs)).numpy()  # begins with a line, and is kept by the heap
    bits = np.ascontiguousarray(x).view(np.uint32)
    for begin in range(0, len(x), AT_ONCE):
        part = bits[begin : begin + AT_ONCE]
        together = 1 if len(part) * inputs * FLOAT // 2 <= KEPT else TOGETHER
        threads = threads_used()
        size = task_size(len(part), MOST, len(panels), together, threads)
        _kernel(out[begin : begin + AT_ONCE], part, panels, _NONE if bias is None else bias, size, threads)
    return out


def task_size(rows: int, most: int, panels: int, together: int, threads: int) -> tuple[int, int]:
    """Rows of a task, in whole blocks, and its panels: at most `most` and `together`, and few enough for each thread to
    have two tasks or more, where possible."""
    parts = -(-rows // most)
    return -(-rows // (parts * BLOCK)) * BLOCK, max(1, min(together, parts * panels // (2 * threads)))
