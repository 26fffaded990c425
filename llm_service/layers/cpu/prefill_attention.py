"""Attention of many queries on a CPU in float32, compiled by numba, for processors with AVX-512. Keys and values are
laid out in panels; each tile of queries goes over a stretch of keys at a time, with the running softmax of
https://arxiv.org/abs/2205.14135. A query's sums do not depend on those beside it: docs/design/cpu-kernels.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Array, Typed, inner
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import LANES
from common.cpu.vectors.powers import cap, hide_others, highest, to_powers
from common.cpu.vectors.products import NOTHING, add_products
from llm_service.layers.attention.backend import CAUSAL, PagedChunk

_ZERO = np.float32(0.0)
_WIDTH = 64
"""Keys of a panel, or numbers of a value."""
_VECTORS = _WIDTH // LANES
_ROWS = 6
"""Queries whose sums are kept in registers."""
_TILE = 4 * _ROWS
"""Queries that go over the keys together, so that a panel is read from a first-level cache by most of them."""
STRETCH = 4 * _WIDTH
"""Keys whose scores are known before they are weighed; where a sequence is cut before what is seen of it, it is at a
multiple of them, so that no sum depends on that."""
_ROOM = 64 << 20
"""Bytes."""


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """What attends to what.

    `segments` int64 [s, 5]: where its queries begin and end; where its keys begin, and how many; its first panel.
    `seen` int64 [n, 2]: a query sees keys [begin, end) of its segment. `begins` int64 [p, 2]: a panel's segment, and
    its first key there.
    """

    segments: Array
    seen: Array
    begins: Array

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], seen: Sequence[Array] | None = None) -> PrefillMetadata:
        """Segments of so many queries and keys, one behind the other. `seen` has a part for each; without, the last
        query sees all keys, the one before it one less."""
        if seen is None:
            chunks = [PagedChunk(known - count, count, ()) for count, known in zip(queries, keys, strict=True)]
            seen = [CAUSAL.seen(chunk) for chunk in chunks]
        segments: list[tuple[int, ...]] = []
        begins: list[tuple[int, int]] = []
        ends = zip(itertools.accumulate(queries), itertools.accumulate(keys), strict=True)
        for index, ((last, end), count, known) in enumerate(zip(ends, queries, keys, strict=True)):
            segments.append((last - count, last, end - known, known, len(begins)))
            begins += [(index, first) for first in range(0, known, _WIDTH)]
        return cls(*(np.array(part, np.int64) for part in (segments, np.concatenate(seen), begins)))

    def tiles(self, rows: int) -> Array:
        """int64 [t, 2]: segment and first query of every so many queries that go over the keys together."""
        ends = enumerate(self.segments[:, :2].tolist())
        return np.array([(index, first) for index, (begin, end) in ends for first in range(begin, end, rows)], np.int64)


@inner
def _pack_panel(panel: Any, lanes: Any, keys: Any, values: Any, places: Any) -> None:
    """Fills panel [dim, 64] with keys [slots, dim] at so many places, and lanes [parts, 64, 64] with their values; both
    with zeros behind the last."""
    dim, known = panel.shape[0], len(places)
    for index in range(known, _WIDTH):
        for number in range(dim):
            panel[number, index] = _ZERO
    for part in range(lanes.shape[0]):
        for index in range(_WIDTH):
            for number in range(dim - part * _WIDTH if index < known else 0, _WIDTH):
                lanes[part, index, number] = _ZERO
    for index in range(known):
        key, value = keys[places[index]], values[places[index]]
        for number in range(dim):
            panel[number, index] = key[number]
            lanes[number // _WIDTH, index, number % _WIDTH] = value[number]


@inner
def _pack_one(
    task: Any, panels: Any, lanes: Any, keys: Any, values: Any, places: Any, segments: Any, begins: Any, first: Any
) -> None:
    """A panel of `_pack`."""
    head, panel = task // len(begins), task % len(begins)
    segment, begin = begins[panel]
    here = segments[segment, 2] + begin
    end = here + min(_WIDTH, segments[segment, 3] - begin)
    known, worth = keys[:, first + head], values[:, first + head]
    _pack_panel(panels[head, panel], lanes[head, :, panel], known, worth, places[here:end])


def _pack(panels: Any, lanes: Any, keys: Any, values: Any, places: Any, segments: Any, begins: Any, first: Any) -> None:
    """Fills panels [heads, p, dim, 64] with the keys of the KV heads from `first` on, and lanes [heads, parts, p, 64,
    64] with their values, both with zeros behind a segment's last key. The others are as in
    `PrefillMetadata` and `PrefillAttention`."""
    given = panels, lanes, keys, values, places, segments, begins, first
    parallel_for(_pack_one, given, panels.shape[0] * len(begins))


@inner
def _multiply(out: Any, x: Any, weights: Any, rows: Any) -> None:
    """out [rows or more, 64] += x [rows or more, k] · weights [k, 64], each row's numbers side by side; out and x have
    room for a multiple of `_ROWS`, which is what is computed."""
    for row in range(0, rows, _ROWS):
        places = (
            out.ctypes.data + row * out.strides[0],
            out.strides[0],
            x.ctypes.data + row * x.strides[0],
            x.strides[0],
            weights.ctypes.data,
            0,
            0,
        )
        add_products(_ROWS, _VECTORS, _VECTORS, NOTHING, weights, places, weights.shape[0])


@inner
def _cap_rows(scores: Any, rows: Any, wide: Any, softcap: Any) -> None:
    """Draws the scores of so many rows with so many panels' keys below a cap, if there is one."""
    for index in range(rows if softcap > _ZERO else 0):
        cap(scores[index].ctypes.data, wide, np.float32(1.0), softcap)


@inner
def _attend_tile(out: Any, query: Any, panels: Any, lanes: Any, seen: Any, scale: Any, softcap: Any) -> None:
    """float32 out and query [n, dim], n ≤ 24, of one head. Query i sees keys [seen[i, 0], seen[i, 1]), neither of which
    falls from query to query; they are in panels [p, dim, 64], their values in lanes [parts, p, 64, 64]. Scores are
    drawn below `softcap`, 0: they are not.

    All scores of a stretch of keys are known before they are weighed. A query may see none of the first stretches.
    """
    rows, dim, parts = query.shape[0], query.shape[1], lanes.shape[0]
    numbers, sums = np.zeros((_TILE, dim), np.float32), np.zeros((_TILE, parts * _WIDTH), np.float32)
    scores = np.empty((_TILE, STRETCH), np.float32)
    most, total = np.full(_TILE, -np.inf, np.float32), np.zeros(_TILE, np.float32)
    for index in range(rows):
        for place in range(dim):
            numbers[index, place] = query[index, place] * scale
    last = seen[rows - 1, 1]
    for start in range(seen[0, 0] // STRETCH * STRETCH, last, STRETCH):
        wide = (min(STRETCH, last - start) + _WIDTH - 1) // _WIDTH
        for index in range(_TILE):
            for place in range(wide * _WIDTH):
                scores[index, place] = _ZERO
        for panel in range(wide):
            here = scores[:, panel * _WIDTH : (panel + 1) * _WIDTH]
            _multiply(here, numbers, panels[start // _WIDTH + panel], rows)
        _cap_rows(scores, rows, wide, softcap)
        for index in range(rows):
            row = scores[index].ctypes.data
            hide_others(row, wide, seen[index, 0] - start, seen[index, 1] - start)
            above = max(most[index], highest(row, wide))
            if above == -np.inf:  # it has seen nothing yet
                to_powers(row, wide, _ZERO)
                continue
            if start and above > most[index]:
                less = np.exp2(most[index] - above)
                total[index] *= less
                for place in range(parts * _WIDTH):
                    sums[index, place] *= less
            most[index] = above
            total[index] += to_powers(row, wide, above)
        for part in range(parts):
            for panel in range(wide):
                here = sums[:, part * _WIDTH : (part + 1) * _WIDTH]
                weights = scores[:, panel * _WIDTH : (panel + 1) * _WIDTH]
                _multiply(here, weights, lanes[part, start // _WIDTH + panel], rows)
    for index in range(rows):
        for place in range(dim):
            out[index, place] = sums[index, place] / total[index]


@inner
def tile_at(task: Any, tables: Any, first: Any, group: Any, most: Any) -> Any:
    """Of a task, a head's tile of `most` queries: the head, its queries, its KV head of those packed, and the panels of
    its keys. tables are segments, seen and tiles."""
    segments, _, tiles = tables
    own, tile = task // len(tiles), task % len(tiles)
    segment, row = tiles[tile]
    _, end, _, known, base = segments[segment]
    panels = slice(base, base + (known + _WIDTH - 1) // _WIDTH)
    return first * group + own, slice(row, min(row + most, end)), own // group, panels


@inner
def _attend_one(
    task: Any, out: Any, query: Any, panels: Any, lanes: Any, tables: Any, first: Any, group: Any, rule: Any
) -> None:
    """A head's tile of `_attend`; tables are segments, seen and tiles, `rule` is `scale` and `softcap`."""
    head, rows, shared, packed = tile_at(task, tables, first, group, _TILE)
    there = panels[shared, packed], lanes[shared, :, packed]
    _attend_tile(out[rows, head], query[rows, head], *there, tables[1][rows], *rule)


def _attend(
    out: Any,
    query: Any,
    panels: Any,
    lanes: Any,
    segments: Any,
    seen: Any,
    tiles: Any,
    first: Any,
    group: Any,
    scale: Any,
    softcap: Any,
) -> None:
    """float32 out and query [n, heads, dim], of which this computes those that share the KV heads from `first` on,
    `group` each. `scale` and `softcap` include log2 e. panels and lanes are as in `_pack`, the others as in
    `PrefillMetadata`."""
    given = out, query, panels, lanes, (segments, seen, tiles), first, group, (scale, softcap)
    parallel_for(_attend_one, given, panels.shape[0] * group * len(tiles))


_pack_kernel, _attend_kernel = threaded(_pack), threaded(_attend, [vectors])
_slots, _packed, _parts = numba.float32[:, :, ::1], numba.float32[:, :, :, ::1], numba.float32[:, :, :, :, ::1]
_list, _table = numba.int64[::1], numba.int64[:, ::1]
TYPED = {
    "pack": Typed(_pack_kernel, (_packed, _parts, _slots, _slots, _list, _table, _table, numba.intp)),
    "attend": Typed(
        _attend_kernel,
        (
            *(_slots, _slots, _packed, _parts, _table, _table, _table),
            *(numba.intp, numba.intp, numba.float32, numba.float32),
        ),
    ),
}


class PrefillAttention:
    """Attention of one batch, the same in all layers, which share the room for packed keys and values: memory that
    nobody has touched yet comes page by page.

    `places` int64 says where, among the slots of a cache, the keys of all segments are; `scale` is what products are
    multiplied by, None: dim^-0.5, and scores are drawn below `softcap`, None: they are not. Keys and values in panels
    take `room` bytes at most, unless one head's take more."""

    kernels: ClassVar[tuple[str, ...]] = (f"{__name__}:pack", f"{__name__}:attend")
    """Their names, as `common.cpu.jit.find` takes them."""
    _kernels: ClassVar[tuple[Any, Any]] = (_pack_kernel, _attend_kernel)
    _tile: ClassVar[int] = _TILE

    def __init__(
        self,
        metadata: PrefillMetadata,
        places: Array,
        kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        room: int = _ROOM,
    ) -> None:
        self._metadata = metadata
        self._tiles = metadata.tiles(self._tile)
        rule = head_dim**-0.5 if scale is None else scale, softcap or 0.0
        self._rule = tuple(np.float32(math.log2(math.e) * each) for each in rule)
        self._places = places
        given = len(metadata.begins), head_dim
        at_once = room // sum(each.nbytes for each in self._packed(1, *given))
        self._room = self._packed(min(kv_heads, max(1, at_once)), *given)

    @staticmethod
    def _packed(heads: int, count: int, head_dim: int) -> tuple[Array, Array]:
        """Room for keys and for values of so many heads, in `count` panels each, as the kernels take it."""
        parts = math.ceil(head_dim / _WIDTH)
        return (
            np.empty((heads, count, head_dim, _WIDTH), np.float32),
            np.empty((heads, parts, count, _WIDTH, _WIDTH), np.float32),
        )

    @staticmethod
    def _numbers(x: Tensor) -> Array:
        """x, which lies together, as the kernels take it."""
        numbers: Array = x.numpy()
        return numbers

    @classmethod
    def _queries(cls, x: Tensor) -> Array:
        """The same of queries, which may be apart."""
        return cls._numbers(x.contiguous())

    def write(self, places: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Sets keys and values [slots, kv_heads, dim] at places int64 [n] to key and value [n, kv_heads, dim], float32,
        rounded to the cache's type."""
        keys.index_copy_(0, places, key.to(keys.dtype))
        values.index_copy_(0, places, value.to(values.dtype))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query float32 [n, heads, dim] → [n, heads, dim]; keys and values [slots, kv_heads, dim], of the cache's type,
        each of which lies together: the kernels are compiled for that alone."""
        kv_heads, (pack, compute) = keys.shape[1], self._kernels
        group, metadata = query.shape[1] // kv_heads, self._metadata
        numbers, *cached = self._queries(query), self._numbers(keys), self._numbers(values)
        out = np.empty(query.shape, np.float32)
        for first in range(0, kv_heads, len(self._room[0])):
            packed = tuple(part[: kv_heads - first] for part in self._room)
            pack(*packed, *cached, self._places, metadata.segments, metadata.begins, first)
            compute(out, numbers, *packed, metadata.segments, metadata.seen, self._tiles, first, group, *self._rule)
        return torch.from_numpy(out)
