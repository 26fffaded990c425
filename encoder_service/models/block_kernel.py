"""The parts of a vision transformer block before and after its attention, in bfloat16, for processors with AMX: two
numba kernels whose threads start once (`common.cpu.phases`). Weights are in panels of pairs for tiles. Arithmetic is
float32; outputs of kernels, inputs of norms and of products are rounded. A row's result does not depend, to the bit, on
the other rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import panel_tasks, phases, tile_kernel, vectors, weight_panels
from common.cpu.jit import Array, Typed, exact, inner, threads_used
from common.cpu.panel_tasks import SIZE, count_tasks
from common.cpu.phases import counts_of, done, take, wait
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_kernel import (
    AT_ONCE,
    ROW,
    TOGETHER,
    ask_share,
    packed_rows,
    padded,
    room_for,
)
from common.cpu.vectors.llvm import FLOAT, LINE
from common.cpu.vectors.shorts import SHORT, add_sums, gate_sums, norm_row, open_sums, rms_norm_row, rotate, round_sums
from common.cpu.vectors.tiles import BLOCK, add_tiles, configure_tiles, multiply_tiles, release_tiles
from common.cpu.weight_panels import VECTORS, WIDTH, first_line

_STRETCH = 64
"""Pairs of inputs that all rows of a task go through before the next: 16 KiB of a panel."""
_LEAST, _MOST = 256, 512
"""Rows of a task, if there are as many. With fewer, weights are read once per thread, which takes longer than reading
rows that other threads have written."""
_WHOLE = 192
"""Most pairs for which rows pass through in one piece, so that sums stay in place."""
_HALF = VECTORS // 2
_LINES = BLOCK * ROW // LINE
"""Lines that the weights of 16 pairs are."""
_AS_IT_IS = False, np.float32(0.0), np.float32(0.0)
"""In place of an activation."""


@inner
def _blocks(rows: Any) -> Any:
    """The number of blocks of so many rows."""
    return (rows + BLOCK - 1) // BLOCK


@inner
def _task_at(index: Any, rows: Any, panels: Any, size: Any) -> Any:
    """A task of a product: its first row, number of rows, first panel and number of panels. Tasks with the same rows
    are adjacent, so a thread mostly has rows in its cache that it has made itself."""
    most, together = size
    groups = (panels + together - 1) // together
    begin, first = index // groups * most, index % groups * together
    return begin, min(most, rows - begin), first, min(together, panels - first)


@exact
def _norm_all(counts: Any, phase: Any, thread: Any, packed: Any, x: Any, norm: Any) -> None:
    """Fills int16 packed [m, numbers] with rows of x [n, width], normed; the rest of a row is zeros. Without a bias
    rows are divided by the root of their mean square."""
    (weight, bias, eps), rows, width = norm, x.shape[0], x.shape[1]
    task = take(counts, phase, thread, _blocks(rows))
    while task >= 0:
        for row in range(task * BLOCK, min(rows, (task + 1) * BLOCK)):
            to, here = packed[row].ctypes.data, x[row].ctypes.data
            if len(bias):
                norm_row(to, here, (weight.ctypes.data, bias.ctypes.data), width, eps)
            else:
                rms_norm_row(to, here, weight.ctypes.data, width, eps)
            packed[row, width:] = np.int16(0)
        done(counts, phase)
        task = take(counts, phase, thread, _blocks(rows))


@inner
def _pack_all(counts: Any, phase: Any, thread: Any, packed: Any, x: Any) -> None:
    """Fills it with the rows as they are."""
    rows, width = x.shape
    task = take(counts, phase, thread, _blocks(rows))
    while task >= 0:
        for row in range(task * BLOCK, min(rows, (task + 1) * BLOCK)):
            packed[row, :width] = x[row]
            packed[row, width:] = np.int16(0)
        done(counts, phase)
        task = take(counts, phase, thread, _blocks(rows))


@exact
def _turn_all(counts: Any, phase: Any, thread: Any, heads: Any, rotary: Any) -> None:
    """Rotates the first so many heads of int16 heads [n, outputs], in place."""
    cosine, sine, rotated, dim = rotary
    rows, half = heads.shape[0], dim // 2
    later = cosine.shape[2] - half
    task = take(counts, phase, thread, _blocks(rows))
    while task >= 0:
        for row in range(task * BLOCK, min(rows, (task + 1) * BLOCK)):
            tables = (
                *(cosine[row, 0].ctypes.data, sine[row, 0].ctypes.data),
                *(cosine[row, 0, later:].ctypes.data, sine[row, 0, later:].ctypes.data),
            )
            first = heads[row].ctypes.data
            for head in range(rotated):
                place = first + head * dim * SHORT
                rotate(place, place, tables, half)
        task = take(counts, phase, thread, _blocks(rows))


@inner
def _sum_blocks(fresh: Any, blocks: Any, lines: Any, places: Any, count: Any) -> None:
    """Multiplies one or two blocks of rows with a stretch of a panel, `places` as in `add_tiles`: two with half of the
    outputs, then with the others. Sums start at 0 if they are `fresh`; with each 16 pairs so many lines of the next
    data are prefetched."""
    out, out_step, x, x_step, weights, size, coming = places
    if blocks == 1:
        if fresh:
            multiply_tiles(1, VECTORS, lines, places, count)
        else:
            add_tiles(1, VECTORS, lines, places, count)
        return
    for half in range(2):
        more = half * (ROW // 2)
        here = (out + more, out_step, x, x_step, weights + more, size, coming + half * (lines // 2) * count * LINE)
        if fresh:
            multiply_tiles(2, _HALF, lines // 2, here, count)
        else:
            add_tiles(2, _HALF, lines // 2, here, count)


@inner
def _multiply(outs: Any, bias: Any, act: Any, room: Any, packed: Any, panels: Any, task: Any, apart: Any) -> None:
    """Writes the product of a task's rows and panels, two blocks of rows and one panel at a time, whose sums stay in
    the first-level cache. Unless `apart` is 0, the panel of values is `apart` panels behind each."""
    begin, rows, first, count = task
    pairs, step, size = panels.shape[1], packed.shape[1] * FLOAT, padded(rows)
    stretch, each = pairs if pairs <= _WHOLE else _STRETCH, 2 if apart else 1
    stays = each == 1 and stretch == pairs
    sums, weights = room.ctypes.data + first_line(room) * FLOAT, panels.ctypes.data
    configure_tiles(BLOCK)
    for at in range(0, pairs, stretch):
        steps = min(stretch, pairs - at) // BLOCK
        lines = _LINES if size <= 2 * BLOCK else max(VECTORS, _LINES // (size // (2 * BLOCK)))
        for index in range(each * count):
            panel = first + index // each + index % each * apart
            following, then = index + 1, at
            if following == each * count and at + stretch < pairs:
                following, then = 0, at + stretch
            elif following == each * count:  # of the task that this thread is likely to take next
                then = 0
            next_panel = first + following // each + following % each * apart
            coming = weights + (next_panel * pairs + then) * ROW
            for row in range(0, size, 2 * BLOCK):
                here = sums if stays else sums + (index * size + row) * ROW
                x = packed.ctypes.data + (begin + row) * step + at * FLOAT
                places = (here, ROW, x, step, weights + (panel * pairs + at) * ROW, ROW, coming)
                _sum_blocks(at == 0, 1 if row + BLOCK == size else 2, lines, places, steps)
                coming += lines * steps * LINE
                if at + stretch >= pairs and index % each == each - 1:
                    place = begin + row, min(2 * BLOCK, rows - row), first + index // each
                    _write(outs, bias, act, place, here, size * ROW, apart * WIDTH)
    release_tiles()


@exact
def _write(outs: Any, bias: Any, act: Any, place: Any, sums: Any, apart: Any, half: Any) -> None:
    """Rounds the sums of some rows and a panel, with a bias, to int16 out [m, outputs]: added to `more` unless that is
    [0, outputs]; through the activation; and multiplied with gates, which are `apart` bytes before them and whose bias
    is `half` numbers before theirs."""
    (out, more), (begin, rows, panel), (opens, slope, bend) = outs, place, act
    column, outputs = panel * WIDTH, out.shape[1]
    wide, biases = min(WIDTH, outputs - column), bias.ctypes.data + column * FLOAT
    for row in range(rows):
        at, here = ((begin + row) * outputs + column) * SHORT, sums + row * ROW
        to = out.ctypes.data + at
        if half:
            gate_sums(to, (here - apart, biases), (here, biases + half * FLOAT), WIDTH, slope, bend)
        elif opens:
            open_sums(to, here, biases, WIDTH, slope, bend)
        elif len(more):
            add_sums(to, more.ctypes.data + at, here, biases, wide)
        else:
            round_sums(to, here, biases, wide)


@inner
def _multiply_all(
    counts: Any, phase: Any, thread: Any, outs: Any, room: Any, packed: Any, weight: Any, act: Any, size: Any
) -> None:
    """Products with bias, written as by `_write`; `room` is for sums. `act` has the number of rows of `packed`, whether
    the second half of the panels are values, and the activation."""
    (panels, bias), (rows, with_values, act) = weight, act
    own = panels.shape[0] // 2 if with_values else panels.shape[0]
    tasks = count_tasks(rows, own, size)
    task = take(counts, phase, thread, tasks)
    while task >= 0:
        here = _task_at(task, rows, own, size)
        _multiply(outs, bias, act, room, packed, panels, here, own if with_values else 0)
        done(counts, phase)
        task = take(counts, phase, thread, tasks)


@inner
def _room_of(sizes: Any, each: Any) -> Any:
    """Room for the sums of any task of these sizes, with `each` so many panels instead of one."""
    most = 0
    for index in range(len(sizes)):
        most = max(most, sizes[index][0] * sizes[index][1] * each[index])
    return room_for(most, 1)


@inner
def _work_before(
    thread: Any, counts: Any, heads: Any, packed: Any, x: Any, norm: Any, weight: Any, rotary: Any, size: Any
) -> None:
    """One thread's part of `_before`."""
    rows, room = x.shape[0], _room_of((size,), (1,))
    ask_share(counts, thread, weight[0])
    _norm_all(counts, 0, thread, packed.view(np.int16), x, norm)
    wait(counts, 0, _blocks(rows))
    _multiply_all(counts, 1, thread, (heads, x[:0]), room, packed, weight, (rows, False, _AS_IT_IS), size)
    wait(counts, 1, count_tasks(rows, weight[0].shape[0], size))
    _turn_all(counts, 2, thread, heads, rotary)


def _before(
    heads: Any,
    x: Any,
    gain: Any,
    gain_bias: Any,
    eps: Any,
    panels: Any,
    bias: Any,
    cosine: Any,
    sine: Any,
    rotated: Any,
    dim: Any,
    size: Any,
    threads: Any,
) -> None:
    """int16 heads [n, outputs], x [n, width]; the norm's weight [width] and bias [width] or [0]; cosine and sine
    float32 [n, 1, angles], of half a head or of a whole one; `size` rows and panels of a task."""
    counts, packed = counts_of(3, threads), packed_rows(x.shape[0], panels.shape[1] // BLOCK)
    norm, rotary = (gain, gain_bias, eps), (cosine, sine, rotated, dim)
    parallel_for(_work_before, (counts, heads, packed, x, norm, (panels, bias), rotary, size), threads)


@inner
def _work_behind(
    thread: Any, counts: Any, outs: Any, packed: Any, given: Any, weights: Any, norm: Any, act: Any, sizes: Any
) -> None:
    """One thread's part of `_behind`."""
    (out, joined), (packed_mixed, packed_joined, opened), (mixed, x) = outs, packed, given
    (proj, opening, closing), (proj_size, opening_size, closing_size), (with_values, act) = weights, sizes, act
    rows, each, plain = x.shape[0], 2 if with_values else 1, (x.shape[0], False, _AS_IT_IS)
    room = _room_of(sizes, (1, each, 1))
    ask_share(counts, thread, proj[0])
    _pack_all(counts, 0, thread, packed_mixed.view(np.int16), mixed)
    wait(counts, 0, _blocks(rows))
    _multiply_all(counts, 1, thread, (joined, x), room, packed_mixed, proj, plain, proj_size)
    ask_share(counts, thread, opening[0])
    wait(counts, 1, count_tasks(rows, proj[0].shape[0], proj_size))
    _norm_all(counts, 2, thread, packed_joined.view(np.int16), joined, norm)
    wait(counts, 2, _blocks(rows))
    inner = (opened.view(np.int16), x[:0])
    _multiply_all(counts, 3, thread, inner, room, packed_joined, opening, (rows, with_values, act), opening_size)
    ask_share(counts, thread, closing[0])
    wait(counts, 3, count_tasks(rows, opening[0].shape[0] // each, opening_size))
    _multiply_all(counts, 4, thread, (out, joined), room, opened, closing, plain, closing_size)


def _behind(
    out: Any,
    mixed: Any,
    x: Any,
    proj: Any,
    proj_bias: Any,
    gain: Any,
    gain_bias: Any,
    eps: Any,
    opening: Any,
    opening_bias: Any,
    with_values: Any,
    slope: Any,
    bend: Any,
    closing: Any,
    closing_bias: Any,
    proj_size: Any,
    opening_size: Any,
    closing_size: Any,
    threads: Any,
) -> None:
    """int16 out, mixed and x [n, width]; other arguments as in `behind`; sizes are rows and panels of a task."""
    rows, counts, joined = x.shape[0], counts_of(5, threads), np.empty(x.shape, np.int16)
    packed_mixed, packed_joined = (
        packed_rows(rows, proj.shape[1] // BLOCK),
        packed_rows(rows, opening.shape[1] // BLOCK),
    )
    opened = packed_rows(rows, opening.shape[0] // (2 if with_values else 1) * (WIDTH // (2 * BLOCK)))
    weights = (proj, proj_bias), (opening, opening_bias), (closing, closing_bias)
    norm, act, packed = (
        (gain, gain_bias, eps),
        (with_values, (True, slope, bend)),
        (packed_mixed, packed_joined, opened),
    )
    sizes = proj_size, opening_size, closing_size
    parallel_for(_work_behind, (counts, (out, joined), packed, (mixed, x), weights, norm, act, sizes), threads)


_MADE_OF = [vectors, panel_tasks, phases, weight_panels, tile_kernel]
_before_kernel, _behind_kernel = (threaded(each, _MADE_OF) for each in (_before, _behind))
_rows, _vector, _table = numba.int16[:, ::1], numba.int16[::1], numba.float32[:, :, ::1]
_number, _weight = numba.float32, (numba.uint64[:, :, ::1], numba.float32[::1])
TYPED = {
    "before": Typed(
        _before_kernel,
        (
            *(_rows, _rows, _vector, _vector, _number, *_weight, _table, _table, numba.intp, numba.intp),
            *(SIZE, numba.intp),
        ),
    ),
    "behind": Typed(
        _behind_kernel,
        (
            *(_rows, _rows, _rows, *_weight, _vector, _vector, _number, *_weight, numba.boolean, _number, _number),
            *(*_weight, SIZE, SIZE, SIZE, numba.intp),
        ),
    ),
}
KERNELS = tuple(f"{__name__}:{name}" for name in TYPED)
"""Their names, as `common.cpu.jit.find` takes them."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Panels of pairs for tiles, and a bias, float32 [64 · panels], which is 0 for padding."""

    panels: Array
    bias: Array


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's weight, bfloat16 [width] as int16; its bias, or [0]: rows are divided by the root of their mean square;
    and its eps."""

    weight: Array
    bias: Array
    eps: float


@dataclass(frozen=True, slots=True)
class Opening:
    """The activation of a feed-forward part, x · logistic(slope · (x + bend · x³)). `with_values`: the first half of
    its panels are gates, and the second half the values that they multiply."""

    with_values: bool
    slope: float
    bend: float


def before(x: Tensor, norm: Norm, weight: Weight, tables: tuple[Tensor, Tensor], heads: int, dim: int) -> Tensor:
    """bfloat16 x [n, width] → the `heads` [n, heads, dim] of its norm, the first two thirds of which are rotated by
    `tables`: cosines and sines float32 [n, 1, dim / 2], or [n, 1, dim] of both halves."""
    out, threads = x.new_empty(len(x), heads * dim), threads_used()
    cosine, sine = (table.contiguous().numpy() for table in tables)
    shorts, rows = as_shorts(out), as_shorts(x.contiguous())
    for begin in range(0, len(x), AT_ONCE):
        here = slice(begin, begin + AT_ONCE)
        _before_kernel(
            *(shorts[here], rows[here], norm.weight, norm.bias, np.float32(norm.eps), weight.panels, weight.bias),
            *(cosine[here], sine[here], heads // 3 * 2, dim),
            *(_size_of(len(rows[here]), weight, 1, threads), threads),
        )
    return out.view(len(x), heads, dim)


def behind(mixed: Tensor, x: Tensor, weights: tuple[Weight, Weight, Weight], norm: Norm, opening: Opening) -> Tensor:
    """bfloat16 mixed, the output of attention, and x, the block's input, [n, width] → the block's output. `weights` are
    those of the projection, of the layer before the activation, and of the layer after it."""
    out, threads = torch.empty_like(x), threads_used()
    shorts, rows, more = as_shorts(out), as_shorts(x.contiguous()), as_shorts(mixed.contiguous())
    proj, first, last = weights
    each = 2 if opening.with_values else 1
    for begin in range(0, len(x), AT_ONCE):
        here = slice(begin, begin + AT_ONCE)
        count = len(rows[here])
        _behind_kernel(
            *(shorts[here], more[here], rows[here], proj.panels, proj.bias),
            *(norm.weight, norm.bias, np.float32(norm.eps), first.panels, first.bias),
            *(opening.with_values, np.float32(opening.slope), np.float32(opening.bend), last.panels, last.bias),
            *(_size_of(count, proj, 1, threads), _size_of(count, first, each, threads)),
            *(_size_of(count, last, 1, threads), threads),
        )
    return out


def as_shorts(x: Tensor) -> Array:
    """bfloat16 as int16 over the same memory."""
    shorts: Array = x.detach().view(torch.int16).numpy()
    return shorts


def _size_of(rows: int, weight: Weight, each: int, threads: int) -> tuple[int, int]:
    """Rows of a task, in whole blocks, and its panels, in multiples of `each`. Each thread has its own rows if there
    are enough, and at least two tasks if possible."""
    parts = max(-(-rows // _MOST), min(threads, rows // _LEAST))
    panels = parts * len(weight.panels) // (2 * threads * each)
    return -(-rows // (parts * BLOCK)) * BLOCK, max(1, min(TOGETHER // each, panels))
