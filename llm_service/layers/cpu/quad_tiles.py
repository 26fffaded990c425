"""As `quad_kernel`, by tiles, for processors with AMX: the same whole sums, so the same products to the bit."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from common.cpu import panel_tasks, phases, tile_kernel, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.panel_tasks import SIZE, check_rows, product_work
from common.cpu.phases import counts_of
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_kernel import AT_ONCE, KEPT, MOST, TOGETHER, ask_share, padded, room_for, task_size
from common.cpu.vectors.llvm import FLOAT
from common.cpu.vectors.tiles import BLOCK, add_quad_tiles, multiply_quad_tiles
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import panel_kernel, quad_kernel
from llm_service.layers.cpu.quad_kernel import QUAD, pack_row, write_rows

_, sum_few, sum_many = tile_kernel.summing(multiply_quad_tiles, add_quad_tiles)


@inner
def _pack(row: Any, given: Any) -> None:
    _, (packed, scales, sums), x, _, step = given
    width = packed.shape[1] * FLOAT
    packed[row, x.shape[1] // QUAD :] = np.uint32(0)
    pack_row(packed.ctypes.data + row * width, 0, width, scales, sums, row, x, row, step)


@inner
def _multiply(task: Any, given: Any) -> None:
    """Fills a task's part of out."""
    out, (packed, scales, sums), _, (panels, weight, bias), _ = given
    begin, rows, first, count = task
    room = room_for(rows, count)
    if packed.shape[0] <= BLOCK:
        for panel in range(first, first + count):
            sum_few(room, packed, panels, panel, rows)
            write_rows(out, panel, 0, rows, room, scales, sums, weight, bias)
        return
    sum_many(room, packed, panels, (first, count, 0), begin, rows)
    for index in range(count):
        of_panel = room[index * padded(rows) * WIDTH :]
        write_rows(out, first + index, begin, rows, of_panel, scales, sums, weight, bias)


_take_all = product_work(_pack, _multiply)


@inner
def _work(thread: Any, counts: Any, rows: Any, panels: Any, size: Any, given: Any) -> None:
    """One thread's part of `_product`."""
    ask_share(counts, thread, given[3][0])
    _take_all(thread, counts, rows, panels, size, given)


def _product(out: Any, x: Any, panels: Any, weight: Any, bias: Any, step: Any, size: Any, threads: Any) -> None:
    """As in `quad_kernel`; the number of quads is a multiple of 16. A task has `size` rows and panels."""
    rows = x.shape[0]
    numbers = tile_kernel.packed_rows(rows, panels.shape[1] // BLOCK)
    packed = numbers, np.empty(rows, np.float32), np.empty(rows, np.int32)
    given = out, packed, x, (panels, weight, bias), step
    parallel_for(_work, (counts_of(2, threads), rows, panels.shape[0], size, given), threads)


_kernel = threaded(_product, [panel_tasks, phases, vectors, weight_panels, tile_kernel, panel_kernel, quad_kernel])
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
_quads = numba.uint32[:, :, ::1]
TYPED = {"product": Typed(_kernel, (_matrix, _matrix, _quads, _vector, _vector, numba.float32, SIZE, numba.intp))}


def product(x: Array, panels: Array, scale: Array, bias: Array, step: float, inputs: int, outputs: int) -> Array:
    """As in `quad_kernel`.

    Raises ValueError where x has another shape or dtype.
    """
    check_rows(x, inputs)
    out: Array = torch.empty((x.shape[0], outputs)).numpy()  # begins with a line, and is kept by the heap
    x = np.ascontiguousarray(x)
    for begin in range(0, len(x), AT_ONCE):
        part = x[begin : begin + AT_ONCE]
        together = 1 if len(part) * inputs <= KEPT else TOGETHER
        threads = threads_used()
        size = task_size(len(part), MOST, len(panels), together, threads)
        _kernel(out[begin : begin + AT_ONCE], part, panels, scale, bias, np.float32(step), size, threads)
    return out
