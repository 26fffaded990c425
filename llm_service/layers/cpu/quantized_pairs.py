"""A product of several rows with quantised weights in panels, in bfloat16, compiled by numba for AVX512-BF16 (without
AMX). Numbers of 8 and 4 bits are bfloat16 without loss, so rows alone are rounded. Few are multiplied with numbers that
become words in registers; for many a stretch does so first. A group's sums, in float32, are multiplied with its scale.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu import panel_tasks, phases, vectors, weight_panels
from common.cpu.jit import Array, inner
from common.cpu.panel_tasks import product_work
from common.cpu.phases import counts_of
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.products import ROWS, add_scaled, widened_stretch
from common.cpu.vectors.stored import lower_half, rounded, upper_half
from common.cpu.weight_panels import VECTORS, WIDTH, first_line, write_panel
from llm_service.layers.cpu import panel_kernel, quantized_kernel
from llm_service.layers.cpu.panel_kernel import AT_ONCE, TOGETHER, add_rows
from llm_service.layers.cpu.quantized_kernel import (
    E4M3,
    INT8,
    NIBBLES,
    Weight,
    group_constants,
    in_passes,
    rows_of_task,
    typed,
)

_STRETCH = 64
"""Pairs of inputs that all rows go through before the next: 16 KiB of words, half of most first-level caches."""
FEW = 2 * TOGETHER
"""Up to so many rows are multiplied with numbers as they are stored; they are converted to words for each six rows."""
SHORTEST = 32
"""Inputs of a group at the least: for shorter ones scales cost as much as products."""
_E4M3, _INT8 = (np.empty(0, np.uint8),), (np.empty(0, np.int8),)
_NIBBLES, _E2M1 = (np.empty(0, np.int32),), (np.empty(0, np.int64),)
_PAIRS = np.empty(0, np.uint64)
"""The storage format, as intrinsics know it; the first four are `Paired`."""


@numba.njit(inline="always")
def _add_few(form: Any, rows: Any, places: Any, count: Any) -> None:
    """`add_products` of numbers in any form."""
    if form == E4M3:
        add_rows(VECTORS, VECTORS, 1, _E4M3, (0, rows), places, count)
    elif form == INT8:
        add_rows(VECTORS, VECTORS, 1, _INT8, (0, rows), places, count)
    elif form == NIBBLES:
        add_rows(VECTORS, VECTORS, 1, _NIBBLES, (0, rows), places, count)
    else:
        add_rows(VECTORS, VECTORS, 1, _E2M1, (0, rows), places, count)


@numba.njit(inline="always")
def widen(form: Any, words: Any, numbers: Any, count: Any) -> None:
    """`widened_stretch` of numbers in any form."""
    if form == E4M3:
        widened_stretch(VECTORS, _E4M3, words, numbers, count)
    elif form == INT8:
        widened_stretch(VECTORS, _INT8, words, numbers, count)
    elif form == NIBBLES:
        widened_stretch(VECTORS, _NIBBLES, words, numbers, count)
    else:
        widened_stretch(VECTORS, _E2M1, words, numbers, count)


@inner
def _multiply(task: Any, given: Any) -> None:
    """Fills a task's part of out, in one panel."""
    out, packed, sums, _, weight, bias, (ends, _) = given
    (codes, form, scale, kind, zero, unit), (begin, rows, panel, _) = weight, task
    inputs, size = codes.shape[1], codes.shape[2]
    room = np.zeros((2 * (rows + 1) + _STRETCH + 2) * WIDTH + LANES, np.float32)
    totals = room.ctypes.data + first_line(room) * FLOAT
    parts = totals + (rows + 1) * WIDTH * FLOAT
    words = parts + (rows + 1) * WIDTH * FLOAT
    both = words + _STRETCH * WIDTH * FLOAT
    numbers = codes.ctypes.data + panel * inputs * size
    group = at = 0
    while at < inputs:
        stretch = at // (2 * _STRETCH)
        end = min(ends[group], (stretch + 1) * 2 * _STRETCH)
        pairs, first = (end - at) // 2, at // 2 - stretch * _STRETCH
        x = packed.ctypes.data + ((stretch * packed.shape[1] + begin) * _STRETCH + first) * FLOAT
        if rows <= FEW:
            here = numbers + at * size
            _add_few(form, rows, (parts, WIDTH * FLOAT, x, _STRETCH * FLOAT, here, here, 2 * size), pairs)
        else:
            widen(form, words, numbers + at * size, pairs)
            places = (parts, WIDTH * FLOAT, x, _STRETCH * FLOAT, words, words, WIDTH * FLOAT)
            add_rows(VECTORS, VECTORS, ROWS, _PAIRS, (0, rows), places, pairs)
        if end == ends[group]:
            scales, zeros = group_constants(both, scale, kind, zero, group, panel, codes.shape[0])
            for row in range(rows):
                of_x = sums[begin + row, group] if zero.shape[0] else np.float32(0.0)
                add_scaled(VECTORS, (totals, parts, scales, zeros), row * WIDTH * FLOAT, of_x)
            group += 1
        at = end
    write_panel(out, panel, begin, rows, room, unit, bias)


@inner
def _pack(row: Any, given: Any) -> None:
    """Packs a row of x [m, k], bits of float32, into uint32 packed [stretches, m, 64]: pairs, rounded to bfloat16, in
    `order` if there is one. Also sums its groups into sums float32 [m, groups], or [m, 0] where they are not needed."""
    _, packed, sums, x, _, _, (ends, order) = given
    inputs = x.shape[1]
    for stretch in range(packed.shape[0]):
        first = stretch * 2 * _STRETCH
        for pair in range(min(_STRETCH, (inputs - first) // 2)):
            place = first + 2 * pair
            low = x[row, order[place] if len(order) else place]
            high = x[row, order[place + 1] if len(order) else place + 1]
            packed[stretch, row, pair] = rounded(low) >> np.uint32(16) | rounded(high) & np.uint32(0xFFFF0000)
    at = 0
    for group in range(sums.shape[1]):
        total = np.float32(0.0)
        while at < ends[group]:
            word = packed[at // 2 // _STRETCH, row, at // 2 % _STRETCH]
            total += lower_half(word) + upper_half(word)
            at += 2
        sums[row, group] = total


_work = product_work(_pack, _multiply)


def _product(out: Any, x: Any, weight: Any, bias: Any, groups: Any, size: Any, threads: Any) -> None:
    """As in `quantized_kernel`, for groups that fit; x are bits of float32."""
    (rows, inputs), panels, zero = x.shape, weight[0].shape[0], weight[4]
    stretches = (inputs + 2 * _STRETCH - 1) // (2 * _STRETCH)
    packed = np.empty((stretches, rows + 1, _STRETCH), np.uint32)
    for stretch in range(stretches):
        packed[stretch, rows] = np.uint32(0)
    sums = np.empty((rows, len(groups[0]) if zero.shape[0] else 0), np.float32)
    given = out, packed, sums, x, weight, bias, groups
    parallel_for(_work, (counts_of(2, threads), rows, panels, size, given), threads)


_kernel = threaded(_product, [panel_tasks, phases, vectors, weight_panels, panel_kernel, quantized_kernel])
TYPED = {"product": typed(_kernel, numba.uint32)}


def fits(ends: Array) -> bool:
    """Whether groups that end so are long enough, and no pair is in two of them."""
    lengths = np.diff(ends, prepend=0)
    return not (lengths % 2).any() and int(lengths.min(initial=SHORTEST)) >= SHORTEST


def product(x: Array, weight: Weight, groups: tuple[Array, Array], bias: Array | None, outputs: int) -> Array:
    """As `quantized_kernel.product`, for groups that fit, with rows rounded to bfloat16.

    Raises ValueError where x has another shape or dtype.
    """
    return in_passes(_kernel, np.uint32, AT_ONCE, x, weight, groups, bias, outputs, rows_of_task)
