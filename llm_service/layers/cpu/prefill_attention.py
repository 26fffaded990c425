"""Attention of many queries on a CPU in float32, compiled by numba, for processors with AVX-512. Keys and values are
packed into panels; each tile of queries takes a stretch of keys at a time, with the online softmax of
https://arxiv.org/abs/2205.14135. A query's sums do not depend on the batch: docs/design/cpu-kernels.md."""

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
"""Keys whose scores are computed before they are weighted. Where a window skips the beginning of a sequence, it skips a
multiple of them, so that no sum depends on it."""
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
        """Segments with so many queries and keys, one after the other. `seen` has an array for each; without it, the
        last query sees all keys, the one before it one less, and so on."""
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
        """int64 [t, 2]: the segment and the first query of each tile of `rows` queries."""
        ends = enumerate(self.segments[:, :2].tolist())
        return np.array([(index, first) for index, (begin, end) in ends for first in range(begin, end, rows)], np.int64)


@inner
def _pack_panel(panel: Any, lanes: Any, keys: Any, values: Any, places: Any) -> None:
    """Fills panel [dim, 64] with the keys [slots, dim] at the given slots, and lanes [parts, 64, 64] with their values,
    both padded with zeros behind the last."""
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
    64] with their values, both padded with zeros behind a segment's last key. The others are as in `PrefillMetadata`
    and `PrefillAttention`."""
    given = panels, lanes, keys, values, places, segments, begins, first
    parallel_for(_pack_one, given, panels.shape[0] * len(begins))


@inner
def _multiply(out: Any, x: Any, weights: Any, rows: Any) -> None:
    """out [rows or more, 64] += x [rows or more, k] · weights [k, 64]; rows of out and x are contiguous. A multiple of
    `_ROWS` is computed, for which out and x have room."""
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
    """Caps the scores of `rows` rows with the keys of `wide` panels, if there is a cap."""
    for index in range(rows if softcap > _ZERO else 0):
        cap(scores[index].ctypes.data, wide, np.float32(1.0), softcap)


@inner
def _attend_tile(out: Any, query: Any, panels: Any, lanes: Any, seen: Any, scale: Any, softcap: Any) -> None:
    """float32 out and query [n, dim], n ≤ 24, of one head. Query i sees keys [seen[i, 0], seen[i, 1]), neither of which
    decreases from query to query; the keys are in panels [p, dim, 64], their values in lanes [parts, p, 64, 64].
    `softcap` bounds scores; 0: none.

    All scores of a stretch of keys are computed before they are weighted. A query may see none of the first stretches.
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
    """A task's tile of at most `most` queries of one head: the head, its queries, the place of its KV head among the
    packed ones, and the panels of its keys. tables are segments, seen and tiles."""
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
    """float32 out and query [n, heads, dim]. It computes the query heads that share the KV heads from `first` on,
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
    """Attention of one batch, the same in all layers, which share the memory for packed keys and values, because fresh
    memory costs page faults.

    `places` int64 are the cache slots of the keys of all segments; `scale` multiplies the scores, None: dim^-0.5;
    `softcap` bounds them, None: not. Packed keys and values take at most `room` bytes, unless those of one head take
    more.
    """

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
        """Memory for packed keys and values of so many heads, in `count` panels each, in the kernels' layout."""
        parts = math.ceil(head_dim / _WIDTH)
        return (
            np.empty((heads, count, head_dim, _WIDTH), np.float32),
            np.empty((heads, parts, count, _WIDTH, _WIDTH), np.float32),
        )

    @staticmethod
    def _numbers(x: Tensor) -> Array:
        """A contiguous x as an array for the kernels."""
        numbers: Array = x.numpy()
        return numbers

    @classmethod
    def _queries(cls, x: Tensor) -> Array:
        """The same for queries, which may be strided."""
        return cls._numbers(x.contiguous())

    def write(self, places: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Sets keys and values [slots, kv_heads, dim] at places int64 [n] to key and value [n, kv_heads, dim], float32,
        rounded to the cache's type."""
        keys.index_copy_(0, places, key.to(keys.dtype))
        values.index_copy_(0, places, value.to(values.dtype))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query float32 [n, heads, dim] → [n, heads, dim]; keys and values [slots, kv_heads, dim], in the cache's
        dtype, both contiguous: the kernels are compiled for that alone."""
        kv_heads, (pack, compute) = keys.shape[1], self._kernels
        group, metadata = query.shape[1] // kv_heads, self._metadata
        numbers, *cached = self._queries(query), self._numbers(keys), self._numbers(values)
        out = np.empty(query.shape, np.float32)
        for first in range(0, kv_heads, len(self._room[0])):
            packed = tuple(part[: kv_heads - first] for part in self._room)
            pack(*packed, *cached, self._places, metadata.segments, metadata.begins, first)
            compute(out, numbers, *packed, metadata.segments, metadata.seen, self._tiles, first, group, *self._rule)
        return torch.from_numpy(out)
