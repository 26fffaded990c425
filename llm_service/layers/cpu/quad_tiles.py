"""As `quad_kernel`, by tiles, for processors with AMX: the same whole sums, so the same products to the bit."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from common.cpu import phases, tile_kernel, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.phases import counts_of, done, take, wait
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_kernel import AT_ONCE, KEPT, MOST, TOGETHER, count_tasks, padded, room_for, task_at, task_size
from common.cpu.vectors.llvm import FLOAT
from common.cpu.vectors.tiles import BLOCK, add_quad_tiles, multiply_quad_tiles
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import panel_kernel, quad_kernel
from llm_service.layers.cpu.quad_kernel import QUAD, pack_row, write_rows

_, sum_few, sum_many = tile_kernel.summing(multiply_quad_tiles, add_quad_tiles)


@inner
def _multiply(
    out: Any, packed: Any, scales: Any, sums: Any, panels: Any, weight: Any, bias: Any, task: Any, size: Any
) -> None:
    """Fills a task's part of out; the others are as in `_product`."""
    begin, rows, first, count = task_at(task, out.shape[0], panels.shape[0], size)
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


@inner
def _work(
    thread: Any,
    counts: Any,
    out: Any,
    packed: Any,
    scales: Any,
    sums: Any,
    x: Any,
    panels: Any,
    weight: Any,
    bias: Any,
    step: Any,
    size: Any,
) -> None:
    """One thread's part of `_product`."""
    rows, width = x.shape[0], packed.shape[1] * FLOAT
    tile_kernel.ask_share(counts, thread, panels)
    row = take(counts, 0, thread, rows)
    while row >= 0:
        packed[row, x.shape[1] // QUAD :] = np.uint32(0)
        pack_row(packed.ctypes.data + row * width, 0, width, scales, sums, row, x, row, step)
        done(counts, 0)
        row = take(counts, 0, thread, rows)
    wait(counts, 0, rows)
    tasks = count_tasks(rows, panels.shape[0], size)
    task = take(counts, 1, thread, tasks)
    while task >= 0:
        _multiply(out, packed, scales, sums, panels, weight, bias, task, size)
        task = take(counts, 1, thread, tasks)


def _product(
    out: Any, x: Any, panels: Any, weight: Any, bias: Any, step: Any, most: Any, together: Any, threads: Any
) -> None:
    """As in `quad_kernel`; the number of quads is a multiple of 16. A task has `most` rows of the outputs of `together`
    panels."""
    rows = x.shape[0]
    counts, packed = counts_of(2, threads), tile_kernel.packed_rows(rows, panels.shape[1] // BLOCK)
    scales, sums = np.empty(rows, np.float32), np.empty(rows, np.int32)
    parallel_for(_work, (counts, out, packed, scales, sums, x, panels, weight, bias, step, (most, together)), threads)


_kernel = threaded(_product, [phases, vectors, weight_panels, tile_kernel, panel_kernel, quad_kernel])
_matrix, _vector = numba.float32[:, ::1], numba.float32[::1]
_quads = numba.uint32[:, :, ::1]
TYPED = {"product": Typed(_kernel, (_matrix, _matrix, _quads, _vector, _vector, numba.float32, *[numba.intp] * 3))}


def product(x: Array, panels: Array, scale: Array, bias: Array, step: float, inputs: int, outputs: int) -> Array:
    """As in `quad_kernel`.

    Raises ValueError where x has another shape or dtype.
    """
    if x.ndim != 2 or x.shape[1] != inputs or x.dtype != np.float32:
        raise ValueError(f"{x.dtype} {x.shape} does not fit a weight of {inputs} inputs")
    out: Array = torch.empty((x.shape[0], outputs)).numpy()  # begins with a line, and is kept by the heap
    x = np.ascontiguousarray(x)
    for begin in range(0, len(x), AT_ONCE):
        part = x[begin : begin + AT_ONCE]
        together = 1 if len(part) * inputs <= KEPT else TOGETHER
        threads = threads_used()
        tasks = *task_size(len(part), MOST, len(panels), together, threads), threads
        _kernel(out[begin : begin + AT_ONCE], part, panels, scale, bias, np.float32(step), *tasks)
    return out
