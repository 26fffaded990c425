"""A product of bfloat16 numbers with a weight in panels of pairs (`common.cpu.weight_panels`) by tiles, summed in
float32, compiled by numba for processors with AMX. A row's sums are taken in one order, whatever rows are beside it:
docs/design/cpu-kernels.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from common.cpu import phases, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.phases import counts_of, done, first_of, take, wait
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
"""Pairs between the weights that few rows are multiplied with and those that are asked for meanwhile."""
_LEAST_LINES = 8
"""That are asked for with 16 pairs, while there are any."""
MOST = 32 * BLOCK
"""Rows of a task at most: a stretch of them and their sums with `TOGETHER` panels are five eighths of a MiB, in a
second-level cache."""
TOGETHER = 4
"""Panels of a task whose rows do not stay there as a whole: each stretch of these is brought for all of them."""
KEPT = 1 << 19
"""Bytes of rows that do."""
AT_ONCE = 4 * MOST
"""Rows that are computed in one go, since their numbers are put side by side first, which takes memory."""
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
    """Fills a row of uint32 packed [m, words] with one of x [n, k], bits of float32: numbers in pairs, rounded to the
    nearest bfloat16, of two the even one; what is not a number stays none. The rest is zeros."""
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
    """What adds up products by tiles: see `summing`."""

    add_blocks: Any
    sum_few: Any
    sum_many: Any


def summing(multiply: Any, add: Any) -> TileSums:
    """Parts of kernels that add up products by these two of `common.cpu.vectors.tiles`, to sums that begin at 0 and to
    others."""

    @inner
    def add_blocks(fresh: Any, rows: Any, places: Any, count: Any, most: Any) -> None:
        """Products of whole blocks of rows with a stretch of a panel, `places` as `add_tiles` has them: of two blocks
        at a time with half of the outputs, then with the others. Sums begin at 0 where they are `fresh`. The first
        blocks ask for what comes next, so many lines at most for each 16 pairs of this."""
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
        """The sums of one panel, float32 [rows, 64] from the first line of `room` on, of one block of rows at most,
        which `packed` begins with: they stay in tiles."""
        pairs = panels.shape[1]
        sums = room.ctypes.data + first_line(room) * FLOAT
        weights = panels.ctypes.data + panel * pairs * ROW
        configure_tiles(rows)
        places = (sums, ROW, packed.ctypes.data, packed.shape[1] * FLOAT, weights, ROW, weights + _AHEAD * ROW)
        multiply(1, VECTORS, _LINES, places, pairs // BLOCK)
        release_tiles()

    @inner
    def sum_many(room: Any, packed: Any, panels: Any, chosen: Any, begin: Any, rows: Any) -> None:
        """The sums of some panels, one behind the other, float32 [padded rows, 64] each, from the first line of `room`
        on, of the rows [begin : begin + rows] of `packed`. `chosen` are (first, how many, apart): the second half of an
        even number of panels begins so many behind the first half, unless that is 0, and they lie side by side."""
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
    """Room for the sums of so many rows with so many panels."""
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
def count_tasks(rows: Any, panels: Any, size: Any) -> Any:
    """How many there are of so many rows and panels, `size` of each."""
    most, together = size
    return (rows + most - 1) // most * ((panels + together - 1) // together)


@inner
def task_at(index: Any, rows: Any, panels: Any, size: Any) -> Any:
    """One of them: its first row, its rows, its first panel, and its panels."""
    most, together = size
    parts = (rows + most - 1) // most
    begin, first = index % parts * most, index // parts * together
    return begin, min(most, rows - begin), first, min(together, panels - first)


@inner
def _work(thread: Any, counts: Any, out: Any, packed: Any, x: Any, panels: Any, bias: Any, size: Any) -> None:
    """What a thread does of `_product`."""
    rows = x.shape[0]
    ask_share(counts, thread, panels)
    row = take(counts, 0, thread, rows)
    while row >= 0:
        pack_pairs(packed, row, x, row)
        done(counts, 0)
        row = take(counts, 0, thread, rows)
    wait(counts, 0, rows)
    tasks = count_tasks(rows, panels.shape[0], size)
    task = take(counts, 1, thread, tasks)
    while task >= 0:
        begin, here, first, count = task_at(task, rows, panels.shape[0], size)
        multiply(out, packed, panels, bias, first, first + count, begin, here)
        task = take(counts, 1, thread, tasks)


def _product(out: Any, x: Any, panels: Any, bias: Any, most: Any, together: Any, threads: Any) -> None:
    """float32 out [m, outputs], x [m, k] as bits, panels as of `panels_of_pairs`, bias [outputs] or [0]. A task has
    `most` rows of the outputs of so many panels `together`."""
    counts, packed = counts_of(2, threads), packed_rows(x.shape[0], panels.shape[1] // BLOCK)
    parallel_for(_work, (counts, out, packed, x, panels, bias, (most, together)), threads)


_kernel = threaded(_product, [vectors, phases, weight_panels])
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
TYPED = {
    "product": Typed(_kernel, (_matrix, numba.uint32[:, ::1], numba.uint64[:, :, ::1], _vector, *[numba.intp] * 3))
}
_NONE = np.empty(0, np.float32)


def product(x: Array, panels: Array, bias: Array | None, inputs: int, outputs: int) -> Array:
    """x float32 [m, inputs] → x · panels + bias, float32 [m, outputs].

    Raises ValueError where x has another shape or type.
    """
    if x.ndim != 2 or x.shape[1] != inputs or x.dtype != np.float32:
        raise ValueError(f"{x.dtype} {x.shape} does not fit a weight of {inputs} inputs")
    out: Array = torch.empty((x.shape[0], outputs)).numpy()  # begins with a line, and is kept by the heap
    bits = np.ascontiguousarray(x).view(np.uint32)
    for begin in range(0, len(x), AT_ONCE):
        part = bits[begin : begin + AT_ONCE]
        together = 1 if len(part) * inputs * FLOAT // 2 <= KEPT else TOGETHER
        threads = threads_used()
        tasks = *task_size(len(part), MOST, len(panels), together, threads), threads
        _kernel(out[begin : begin + AT_ONCE], part, panels, _NONE if bias is None else bias, *tasks)
    return out


def task_size(rows: int, most: int, panels: int, together: int, threads: int) -> tuple[int, int]:
    """Rows of a task, in whole blocks, and its panels: not more than these, and so that each thread has two tasks or
    more, where it can."""
    parts = -(-rows // most)
    return -(-rows // (parts * BLOCK)) * BLOCK, max(1, min(together, parts * panels // (2 * threads)))
