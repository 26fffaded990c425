"""Products of rows and weights in a layer's kernels, by the form of the weights' panels: pairs by tiles
(`common.cpu.tile_kernel`), pairs by vectors (`pair_kernel`), quads (`quad_kernel`), or numbers (`panel_kernel`). numba
picks the implementation by the type of the packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

from common.cpu import tile_kernel
from common.cpu.jit import BARE, Array, inner
from common.cpu.tile_kernel import KEPT, MOST, TOGETHER, padded, room_for, sum_few, sum_many, task_size
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.powers import gate, gelu_gate
from common.cpu.vectors.tiles import BLOCK, round_row
from common.cpu.weight_panels import VECTORS, WIDTH, first_line
from llm_service.layers.cpu import pair_kernel, panel_kernel, quad_kernel
from llm_service.layers.cpu.quad_kernel import QUAD

_WORDS = WIDTH // 2
"""Words of pairs that a panel's outputs are."""


@dataclass(frozen=True, eq=False, slots=True)
class PanelForm:
    """A form of panels, named as in `LIKE`. `like` has the type of packed rows; `at_once` rows are computed in one
    pass. `size` gives a task's rows and panels, from the numbers of rows, of panels, of pairs or inputs, of adjacent
    panels, and of threads."""

    name: str
    like: Array | tuple[Array, ...]
    at_once: int
    size: Callable[[int, int, int, int, int], tuple[int, int]]


def _of_tiles(rows: int, panels: int, pairs: int, each: int, threads: int) -> tuple[int, int]:
    together = 1 if rows * pairs * FLOAT <= KEPT else TOGETHER // each
    return task_size(rows, MOST, panels // each, together, threads)


def _of_vectors(rows: int, panels: int, _inputs: int, each: int, threads: int) -> tuple[int, int]:
    return panel_kernel.task_rows(rows, panels // each, threads), 1


TILES = PanelForm("tiles", np.empty((0, 0), np.uint32), tile_kernel.AT_ONCE, _of_tiles)
PAIRS = PanelForm("pairs", np.empty((0, 0, 0), np.uint32), panel_kernel.AT_ONCE, _of_vectors)
NUMBERS = PanelForm("numbers", np.empty((0, 0, 0), np.float32), panel_kernel.AT_ONCE, _of_vectors)
QUADS = PanelForm(
    "quads",
    (np.empty((0, 0, 0), np.int8), np.empty(0, np.float32), np.empty(0, np.int32)),
    panel_kernel.AT_ONCE,
    _of_vectors,
)
LIKE = {
    "tiles": numba.uint32[:, ::1],
    "pairs": numba.uint32[:, :, ::1],
    "quads": types.Tuple((numba.int8[:, :, ::1], numba.float32[::1], numba.int32[::1])),
    "numbers": numba.float32[:, :, ::1],
}
"""numba's types of `LIKE`."""


def packed_like(like: Any, rows: Any, panels: Any) -> Any:
    """Room for rows that are multiplied with panels."""
    raise NotImplementedError


def opened_like(like: Any, rows: Any, panels: Any) -> Any:
    """The same for products of gates and values. It has room for them unpacked where a row's largest one has to be
    known before any of them can be packed."""
    raise NotImplementedError


def packs_opened(opened: Any) -> bool:
    """Whether rows of gates times values are packed only once they are complete."""
    raise NotImplementedError


def pack_opened(opened: Any, row: Any) -> None:
    """Packs one of them."""
    raise NotImplementedError


def pack(packed: Any, row: Any, bits: Any, source: Any) -> None:
    """Fills a row with one of float32 numbers, as bits [n, k]."""
    raise NotImplementedError


def multiply(out: Any, packed: Any, weight: Any, chosen: Any) -> None:
    """Fills out [m, outputs]: `chosen` are the first of some rows, how many, the first of some panels, and how many;
    `weight` panels, a scale and a bias, [outputs] or [0]."""
    raise NotImplementedError


def multiply_gates(opened: Any, packed: Any, weight: Any, chosen: Any, silu: Any) -> None:
    """Packs products of gates and values, for panels whose first half are gates; `chosen` as above, for these products.
    Where `packs_opened`, they are left unpacked."""
    raise NotImplementedError


@overload(packed_like, strict=False, jit_options=BARE)
def _packed_like(like: Any, rows: Any, panels: Any) -> Any:  # noqa: ARG001 - numba asks by names
    if _is_tiles(like):
        return lambda like, rows, panels: tile_kernel.packed_rows(rows, panels.shape[1] // BLOCK)  # noqa: ARG005
    if _is_quads(like):
        return lambda like, rows, panels: quad_kernel.packed_rows(rows, panels.shape[1])  # noqa: ARG005
    if _is_pairs(like):
        return lambda like, rows, panels: pair_kernel.packed_rows(rows, panels.shape[1])  # noqa: ARG005
    return lambda like, rows, panels: panel_kernel.packed_rows(rows, panels.shape[1])  # noqa: ARG005


@overload(opened_like, strict=False, jit_options=BARE)
def _opened_like(like: Any, rows: Any, panels: Any) -> Any:  # noqa: ARG001
    if _is_quads(like):
        return _opened_quads
    return lambda like, rows, panels: packed_like(like, rows, panels)  # noqa: PLW0108 - numba wants its own names


@overload(packs_opened, strict=False, jit_options=BARE)
def _packs_opened(opened: Any) -> Any:
    if _is_quads(opened):
        return lambda opened: True  # noqa: ARG005
    return lambda opened: False  # noqa: ARG005


@overload(pack_opened, strict=False, jit_options=BARE)
def _pack_opened(opened: Any, row: Any) -> Any:  # noqa: ARG001
    return _pack_opened_quads if _is_quads(opened) else lambda opened, row: None  # noqa: ARG005


@overload(pack, strict=False, jit_options=BARE)
def _pack(packed: Any, row: Any, bits: Any, source: Any) -> Any:  # noqa: ARG001
    if _is_quads(packed):
        return _pack_quads
    if _is_tiles(packed):
        return _pack_for_tiles
    return _pack_pairs if _is_pairs(packed) else _pack_numbers


@overload(multiply, strict=False, jit_options=BARE)
def _multiply(out: Any, packed: Any, weight: Any, chosen: Any) -> Any:  # noqa: ARG001
    if _is_quads(packed):
        return _multiply_quads
    if _is_tiles(packed):
        return _multiply_by_tiles
    return _multiply_pairs if _is_pairs(packed) else _multiply_numbers


@overload(multiply_gates, strict=False, jit_options=BARE)
def _multiply_gates(opened: Any, packed: Any, weight: Any, chosen: Any, silu: Any) -> Any:  # noqa: ARG001
    if _is_quads(packed):
        return _gates_of_quads
    if _is_tiles(packed):
        return _gates_by_tiles
    return _gates_of_pairs if _is_pairs(packed) else _gates_of_numbers


def _pack_for_tiles(packed: Any, row: Any, bits: Any, source: Any) -> None:
    tile_kernel.pack_pairs(packed, row, bits, source)


def _pack_pairs(packed: Any, row: Any, bits: Any, source: Any) -> None:
    pair_kernel.pack_pairs(packed, row, bits, source)


def _pack_quads(packed: Any, row: Any, bits: Any, source: Any) -> None:
    quad_kernel.pack_quads(packed[0], packed[1], packed[2], row, bits.view(np.float32), source, np.float32(0.0))


def _opened_quads(like: Any, rows: Any, panels: Any) -> Any:  # noqa: ARG001
    numbers, scales, sums = quad_kernel.packed_rows(rows, panels.shape[1])
    return numbers, scales, sums, np.empty((rows, panels.shape[1] * QUAD), np.float32)


def _pack_opened_quads(opened: Any, row: Any) -> None:
    quad_kernel.pack_quads(opened[0], opened[1], opened[2], row, opened[3], row, np.float32(0.0))


def _pack_numbers(packed: Any, row: Any, bits: Any, source: Any) -> None:
    panel_kernel.pack_row(packed, row, bits.view(np.float32), source)


def _is_quads(packed: Any) -> bool:
    return isinstance(packed, types.BaseTuple)


def _is_tiles(packed: Any) -> bool:
    return not _is_quads(packed) and int(packed.ndim) == 2


def _is_pairs(packed: types.Array) -> bool:
    return bool(packed.dtype == types.uint32)


def _multiply_quads(out: Any, packed: Any, weight: Any, chosen: Any) -> Any:
    panels, scale, bias = weight
    begin, rows, first, count = chosen
    for panel in range(first, first + count):
        quad_kernel.multiply(out, packed[0], packed[1], packed[2], panels, scale, bias, panel, begin, rows)


def _multiply_by_tiles(out: Any, packed: Any, weight: Any, chosen: Any) -> Any:
    panels, _, bias = weight
    begin, rows, first, count = chosen
    tile_kernel.multiply(out, packed, panels, bias, first, first + count, begin, rows)


def _multiply_pairs(out: Any, packed: Any, weight: Any, chosen: Any) -> Any:
    panels, _, bias = weight
    begin, rows, first, count = chosen
    for panel in range(first, first + count):
        pair_kernel.multiply(out, packed, panels, bias, panel, begin, rows)


def _multiply_numbers(out: Any, packed: Any, weight: Any, chosen: Any) -> Any:
    panels, scale, bias = weight
    begin, rows, first, count = chosen
    for panel in range(first, first + count):
        panel_kernel.multiply(out, packed, panels, scale, bias, panel, begin, rows)


def _gates_by_tiles(opened: Any, packed: Any, weight: Any, chosen: Any, silu: Any) -> Any:
    panels, half = weight[0], weight[0].shape[0] // 2
    begin, rows, first, count = chosen
    apart, room = padded(rows) * WIDTH, room_for(rows, 2 * count)
    sums = room.ctypes.data + first_line(room) * FLOAT
    if packed.shape[0] <= BLOCK:
        for panel in range(first, first + count):
            sum_few(room, packed, panels, panel, rows)
            sum_few(room[apart:], packed, panels, half + panel, rows)
            _open_pairs(opened, sums, sums + apart * FLOAT, panel, begin, rows, silu)
        return
    sum_many(room, packed, panels, (first, 2 * count, half), begin, rows)
    for index in range(count):
        gates = sums + index * apart * FLOAT
        _open_pairs(opened, gates, gates + count * apart * FLOAT, first + index, begin, rows, silu)


def _gates_of_pairs(opened: Any, packed: Any, weight: Any, chosen: Any, silu: Any) -> Any:
    panels, half = weight[0], weight[0].shape[0] // 2
    begin, rows, first, count = chosen
    for panel in range(first, first + count):
        gates = pair_kernel.sums_of(packed, panels, panel, begin, rows)
        values = pair_kernel.sums_of(packed, panels, half + panel, begin, rows)
        places = gates.ctypes.data + first_line(gates) * FLOAT, values.ctypes.data + first_line(values) * FLOAT
        _open_pairs(opened, places[0], places[1], panel, begin, rows, silu)


def _gates_of_quads(opened: Any, packed: Any, weight: Any, chosen: Any, silu: Any) -> Any:
    numbers, scales, sums = packed
    panels, scale, bias = weight
    half = panels.shape[0] // 2
    begin, rows, first, count = chosen
    line = np.empty(2 * WIDTH + LANES, np.float32)
    gates_at = line.ctypes.data + first_line(line) * FLOAT
    values_at = gates_at + WIDTH * FLOAT
    for panel in range(first, first + count):
        gates = quad_kernel.sums_of(numbers, panels, panel, begin, rows)
        values = quad_kernel.sums_of(numbers, panels, half + panel, begin, rows)
        for row in range(rows):
            wide, of_row = opened[3][begin + row, panel * WIDTH :].ctypes.data, begin + row
            quad_kernel.write_row(gates_at, gates, row, of_row, panel, scales, sums, scale, bias)
            quad_kernel.write_row(values_at, values, row, of_row, half + panel, scales, sums, scale, bias)
            _open(wide, gates_at, values_at, silu)


def _gates_of_numbers(opened: Any, packed: Any, weight: Any, chosen: Any, silu: Any) -> Any:
    panels, scale, _ = weight
    half = panels.shape[0] // 2
    begin, rows, first, count = chosen
    for panel in range(first, first + count):
        gates = panel_kernel.sums_of(packed, panels, panel, begin, rows)
        values = panel_kernel.sums_of(packed, panels, half + panel, begin, rows)
        if len(scale):
            _scale(gates, scale[panel * WIDTH :], rows)
            _scale(values, scale[(half + panel) * WIDTH :], rows)
        places = gates.ctypes.data + first_line(gates) * FLOAT, values.ctypes.data + first_line(values) * FLOAT
        for row in range(rows):
            to, apart = opened[panel, begin + row].ctypes.data, row * WIDTH * FLOAT
            _open(to, places[0] + apart, places[1] + apart, silu)


@inner
def _open(to: Any, gates: Any, values: Any, silu: Any) -> None:
    """64 gates times values, float32."""
    if silu:
        gate(to, gates, values, VECTORS)
    else:
        gelu_gate(to, gates, values, VECTORS)


@inner
def _open_pairs(opened: Any, gates: Any, values: Any, panel: Any, begin: Any, rows: Any, silu: Any) -> None:
    """Rounds gates times values, sums float32 [rows, 64] each, to the words of `opened` that a panel's outputs are."""
    line = np.empty(WIDTH + LANES, np.float32)
    product = line.ctypes.data + first_line(line) * FLOAT
    for row in range(rows):
        _open(product, gates + row * WIDTH * FLOAT, values + row * WIDTH * FLOAT, silu)
        round_row(words_of(opened, begin + row, panel), product, VECTORS // 2)


def words_of(packed: Any, row: Any, panel: Any) -> Any:
    """The address of a row's words of pairs that a panel's outputs are."""
    raise NotImplementedError


@overload(words_of, strict=False, jit_options=BARE)
def _words_of(packed: Any, row: Any, panel: Any) -> Any:  # noqa: ARG001
    if _is_tiles(packed):
        return lambda packed, row, panel: packed[row, panel * _WORDS :].ctypes.data
    return lambda packed, row, panel: packed[panel // 2, row, panel % 2 * _WORDS :].ctypes.data


@inner
def _scale(sums: Any, scale: Any, rows: Any) -> None:
    """Sums [rows, 64] from the first line on, times a scale [64] for each output."""
    skipped = first_line(sums)
    for row in range(rows):
        for place in range(WIDTH):
            sums[skipped + row * WIDTH + place] *= scale[place]
