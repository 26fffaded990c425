"""Products with quantised weights in panels by tiles, in bfloat16, compiled by numba for processors with AMX. bfloat16
holds 8-bit and 4-bit numbers without loss, so only rows are rounded. A stretch of a panel is converted to words in the
first-level cache and multiplied with all rows; then a group's float32 sums are multiplied with its scale."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import panel_tasks, phases, tile_kernel, vectors, weight_panels
from common.cpu.jit import Array, inner
from common.cpu.panel_tasks import product_work
from common.cpu.phases import counts_of
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_kernel import KEPT, ROW, add_blocks, pack_pairs, packed_rows, task_size
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.products import add_scaled
from common.cpu.vectors.stored import lower_half, upper_half
from common.cpu.vectors.tiles import BLOCK, configure_tiles, release_tiles
from common.cpu.weight_panels import VECTORS, WIDTH, first_line, write_panel
from llm_service.layers.cpu import panel_kernel, quantized_kernel, quantized_pairs
from llm_service.layers.cpu.quantized_kernel import Weight, group_constants, in_passes, typed
from llm_service.layers.cpu.quantized_pairs import widen

_STEP = 2 * BLOCK
"""Inputs of one product by tiles."""
_STRETCH = 4 * _STEP
"""Inputs that are multiplied with all rows before the next ones: 16 KiB of words, which leaves room for rows and
sums."""
_TURN = 2 * BLOCK
"""Rows whose sums of a group are scaled before the next rows are multiplied."""
_MOST = 26 * BLOCK
"""Rows of a task at most: the more, the less often numbers become words."""
_TOGETHER = 2
"""Panels of a task whose rows do not all fit into a second-level cache."""
AT_ONCE = 5 * _MOST
"""Rows that are computed in one pass; they are packed first, which takes memory."""


@inner
def _multiply(task: Any, given: Any) -> None:
    """Fills a task's part of out."""
    out, packed, sums, _, weight, bias, (ends, _) = given
    (codes, form, scale, kind, zero, unit), (begin, rows, first, count) = weight, task
    last = first + count
    inputs, size, step = codes.shape[1], codes.shape[2], packed.shape[1] * FLOAT
    padded = (rows + BLOCK - 1) // BLOCK * BLOCK
    apart, many = padded * WIDTH, count * padded * WIDTH
    room = np.empty(2 * many + (_TURN + _STRETCH // 2 + 2) * WIDTH + LANES, np.float32)
    skipped = first_line(room)
    room[skipped : skipped + many] = np.float32(0.0)
    room[-2 * WIDTH - LANES :] = np.float32(0.0)  # zeros, where no group has any
    totals = room.ctypes.data + skipped * FLOAT
    parts = totals + many * FLOAT
    short = parts + many * FLOAT
    words = short + _TURN * ROW
    both = words + _STRETCH // 2 * ROW
    configure_tiles(min(rows, BLOCK))
    earlier = 0
    for start in range(0, inputs, _STRETCH):
        length = min(_STRETCH, inputs - start)
        x = packed.ctypes.data + begin * step + start // 2 * FLOAT
        for panel in range(first, last):
            numbers = codes.ctypes.data + (panel * inputs + start) * size
            widen(form, words, numbers, length // 2)
            used = skipped + 2 * many + (_TURN + length // 2) * WIDTH
            room[used : used + -(length // 2) % BLOCK * WIDTH] = np.float32(0.0)
            coming = numbers + (inputs if panel + 1 < last else (first - panel) * inputs + _STRETCH) * size
            mine, group, at = (panel - first) * apart * FLOAT, earlier, 0
            while at < length:
                end = min(ends[group] - start, length)
                fresh, whole = start + at == (ends[group - 1] if group else 0), start + end == ends[group]
                if whole:
                    scales, zeros = group_constants(both, scale, kind, zero, group, panel, codes.shape[0])
                # The sums of a group within one stretch are needed only for a few rows' products, and stay in the
                # cache.
                turn = _TURN if fresh and whole else padded
                for row in range(0, padded, turn):
                    some = min(turn, padded - row)
                    part = short if fresh and whole else parts + mine + row * ROW
                    x_at, weights = x + row * step + at // 2 * FLOAT, words + at // 2 * ROW
                    places = (part, ROW, x_at, step, weights, ROW, coming + at * size)
                    add_blocks(fresh, some, places, (end - at + _STEP - 1) // _STEP, 0 if row else _STEP * size // LINE)
                    if whole:
                        for each in range(min(some, rows - row)):
                            of_x = sums[begin + row + each, group] if zero.shape[0] else np.float32(0.0)
                            here = (totals + mine + row * ROW, part, scales, zeros)
                            add_scaled(VECTORS, here, each * ROW, of_x)
                group += whole
                at = end
        while earlier < len(ends) and ends[earlier] <= start + length:
            earlier += 1
    release_tiles()
    for panel in range(first, last):
        write_panel(out, panel, begin, rows, room[(panel - first) * apart :], unit, bias)


@inner
def _pack(row: Any, given: Any) -> None:
    """Packs a row of x [m, k], bits of float32, into uint32 packed [m, words]: pairs, rounded to bfloat16, in `order`
    if there is one. Also sums its groups into sums float32 [m, groups], or [m, 0] where they are not needed."""
    _, packed, sums, x, _, _, (ends, order) = given
    if len(order):
        moved = np.empty((1, len(order)), np.uint32)
        for place in range(len(order)):
            moved[0, place] = x[row, order[place]]
        pack_pairs(packed, row, moved, 0)
    else:
        pack_pairs(packed, row, x, row)
    at = 0
    for group in range(sums.shape[1]):
        total = np.float32(0.0)
        for word in packed[row, at : ends[group] // 2]:
            total += lower_half(word) + upper_half(word)
        sums[row, group] = total
        at = ends[group] // 2


_work = product_work(_pack, _multiply)


def _product(out: Any, x: Any, weight: Any, bias: Any, groups: Any, size: Any, threads: Any) -> None:
    """As in `quantized_pairs`. A task has `size` rows and panels."""
    rows, panels, zero = x.shape[0], weight[0].shape[0], weight[4]
    packed = packed_rows(rows, (x.shape[1] + _STEP - 1) // _STEP)
    sums = np.empty((rows, len(groups[0]) if zero.shape[0] else 0), np.float32)
    given = out, packed, sums, x, weight, bias, groups
    parallel_for(_work, (counts_of(2, threads), rows, panels, size, given), threads)


_made_of = [panel_tasks, phases, vectors, weight_panels, tile_kernel, panel_kernel, quantized_kernel, quantized_pairs]
_kernel = threaded(_product, _made_of)
TYPED = {"product": typed(_kernel, numba.uint32)}


def fits(ends: Array) -> bool:
    """Whether groups that end so are whole steps by tiles; the last may be less, of whole pairs."""
    return not (ends[:-1] % _STEP).any() and not int(ends[-1]) % 2


def product(x: Array, weight: Weight, groups: tuple[Array, Array], bias: Array | None, outputs: int) -> Array:
    """As `quantized_pairs.product`, by tiles, for groups that fit.

    Raises ValueError where x has another shape or dtype.
    """
    together = 1 if len(x) * x.shape[-1] * FLOAT // 2 <= KEPT else _TOGETHER

    def size_of(rows: int, panels: int, threads: int) -> tuple[int, int]:
        return task_size(rows, _MOST, panels, together, threads)

    return in_passes(_kernel, np.uint32, AT_ONCE, x, weight, groups, bias, outputs, size_of)
