"""Attention within segments in bfloat16, compiled by numba for processors with AVX512-BF16. Keys lie in panels of pairs
of numbers, values in panels of pairs of keys, as VDPBF16PS multiplies them. Scores, the online softmax
(https://arxiv.org/abs/2205.14135) and sums are float32. A query's sums do not depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import lines, vectors
from common.cpu.jit import Array, Typed, inner
from common.cpu.lines import lined_up, zeros_lined_up
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.pairs import HALF, fill, interleave, transpose
from common.cpu.vectors.powers import cap, hide_others, highest, to_short_powers
from common.cpu.vectors.products import NOTHING, add_products
from common.cpu.vectors.shorts import round_numbers

WIDTH = 64
"""Keys of a panel."""
_VECTORS = WIDTH // LANES
_ROWS = 6
"""Queries whose scores with a panel are kept in registers."""
TILE = 24
"""Queries that go over the keys together: a common multiple of the row counts whose sums fit into registers."""
TOGETHER = 4
"""Tiles of queries that are computed one after the other in the same room."""
STRETCH = 4 * WIDTH
"""Keys whose scores are computed before they are weighted."""
_AT_ONCE = 2
"""Panels whose values are weighted together: 16 KiB for 64 numbers, half of most first-level caches."""
_WIDEST = 5
"""Vectors of a value that are summed up together."""
_PAIRS = np.empty(0, np.uint64)
"""Says `add_products` that weights are pairs."""


@inner
def fill_row(row: Any, words: Any) -> None:
    """Copies contiguous uint32 words into a row whose length is a multiple of 16, and fills the rest with zeros."""
    fill(row.ctypes.data, words.ctypes.data, len(words), len(row))


@inner
def pack_panel(panel: Any, lanes: Any, keys: Any, values: Any) -> None:
    """Fills uint32 panel [padded, 64] with keys [64, padded], and lanes [parts, 32, width] with values [64, padded], in
    which numbers of two adjacent keys lie side by side. Padding behind the last key and the last number is zero;
    `padded` is a multiple of 16 (see `room`)."""
    padded = panel.shape[0]
    for word in range(0, padded, LANES):
        for index in range(0, WIDTH, LANES):
            to = panel.ctypes.data + (word * WIDTH + index) * FLOAT
            transpose(to, WIDTH * FLOAT, keys.ctypes.data + (index * padded + word) * FLOAT, padded * FLOAT)
    parts, pairs, width = lanes.shape
    for part in range(parts):
        for pair in range(pairs):
            to = lanes.ctypes.data + part * lanes.strides[0] + pair * width * FLOAT
            one = values.ctypes.data + (2 * pair * padded + part * (width // 2)) * FLOAT
            for word in range(0, width // 2, HALF):
                interleave(to + 2 * word * FLOAT, one + word * FLOAT, one + (padded + word) * FLOAT)


@inner
def _pack_one(
    task: Any, panels: Any, lanes: Any, keys: Any, values: Any, size: Any, segments: Any, begins: Any
) -> None:
    """A panel of `_pack`."""
    count, padded = len(begins), panels.shape[2]
    head, panel = task // count, task % count
    begin = begins[panel, 1]
    end = min(begin + WIDTH, segments[begins[panel, 0], 1])
    known, worth = np.empty((WIDTH, padded), np.uint32), np.empty((WIDTH, padded), np.uint32)
    known[end - begin :], worth[end - begin :] = np.uint32(0), np.uint32(0)
    for place in range(begin, end):
        fill(known[place - begin].ctypes.data, keys[0] + place * keys[1] + head * keys[2], size, padded)
        fill(worth[place - begin].ctypes.data, values[0] + place * values[1] + head * values[2], size, padded)
    pack_panel(panels[head, panel], lanes[head, :, panel], known, worth)


def _pack(panels: Any, lanes: Any, keys: Any, values: Any, size: Any, segments: Any, begins: Any) -> None:
    """Fills uint32 panels [heads, p, padded, 64] and lanes [heads, p, parts, 32, width] with keys and values [n, heads,
    size], given as `_Place`; the others are as in `_attend`."""
    parallel_for(_pack_one, (panels, lanes, keys, values, size, segments, begins), panels.shape[0] * len(begins))


@inner
def _add_values(sums: Any, weights: Any, lanes: Any, rows: Any) -> None:
    """sums [24, parts · width] += bfloat16 weights [24, p · 32 words] · lanes [parts, p, 32, width], for `rows`
    rows."""
    parts, width = lanes.shape[0], lanes.shape[3]
    pairs = lanes.shape[1] * lanes.shape[2]
    for part in range(parts):
        out, panel = sums.ctypes.data + part * width * FLOAT, lanes.ctypes.data + part * lanes.strides[0]
        vectors = width // LANES
        step = TILE // 2 if vectors == 2 else 8 if vectors == 3 else 6 if vectors == 4 else 4
        for row in range(0, rows, step):
            places = (
                *(out + row * sums.strides[0], sums.strides[0]),
                *(weights.ctypes.data + row * weights.strides[0], weights.strides[0]),
                *(panel, np.intp(0), np.intp(0)),
            )
            if vectors == 2:
                add_products(12, 2, 2, NOTHING, _PAIRS, places, pairs)
            elif vectors == 3:
                add_products(8, 3, 3, NOTHING, _PAIRS, places, pairs)
            elif vectors == 4:
                add_products(6, 4, 4, NOTHING, _PAIRS, places, pairs)
            else:
                add_products(4, 5, 5, NOTHING, _PAIRS, places, pairs)


@inner
def workspace(panels: Any, lanes: Any, words: Any) -> Any:
    """Memory for one tile of queries: their sums, the totals and highest scores, the scores of a stretch, and the same
    as weights; and `words` of each query, with room for whole vectors."""
    parts, width, padded = lanes.shape[-4], lanes.shape[-1], panels.shape[-2]
    sums, numbers = zeros_lined_up(TILE, parts * width), zeros_lined_up(TILE, padded)
    scores, shorts = zeros_lined_up(TILE, STRETCH), zeros_lined_up(TILE, STRETCH // 2)
    return sums, np.zeros((2, TILE), np.float32), scores, shorts, numbers[:, :words]


@inner
def attend_rows(room: Any, panels: Any, lanes: Any, seen: Any, scale: Any, softcap: Any) -> None:
    """Fills the sums of `workspace` with the weighted values of the n ≤ 24 queries of one head whose words are there.
    Query i sees keys [seen[i, 0], seen[i, 1]), neither of which decreases from query to query; the keys are in panels
    [p, padded, 64], their values in lanes [parts, p, 32, width]. `scale` includes log2 e, and so does `softcap`, which
    bounds scores; 0: none.

    All scores of a stretch of keys are computed before they are weighted. A query may see none of the first stretches.
    Rows behind the last query are computed from whatever is there.
    """
    (sums, state, scores, shorts, numbers), rows = room, len(seen)
    total, most = state[0], state[1]
    sums[:rows], total[:], most[:] = np.float32(0.0), np.float32(0.0), np.float32(-np.inf)
    last, steps = seen[rows - 1, 1], np.float32(1.0) if softcap > np.float32(0.0) else scale
    for start in range(seen[0, 0] // STRETCH * STRETCH, last, STRETCH):
        wide = (min(STRETCH, last - start) + WIDTH - 1) // WIDTH
        for index in range(rows):
            scores[index, : wide * WIDTH] = np.float32(0.0)
        for panel in range(wide):
            keys = panels[start // WIDTH + panel]
            for row in range(0, rows, _ROWS):
                places = (
                    *(scores[row:, panel * WIDTH :].ctypes.data, scores.strides[0]),
                    *(numbers[row:].ctypes.data, numbers.strides[0]),
                    *(keys.ctypes.data, np.intp(0), np.intp(0)),
                )
                add_products(_ROWS, _VECTORS, _VECTORS, NOTHING, _PAIRS, places, numbers.shape[1])
        for index in range(rows):
            here = scores[index].ctypes.data
            if softcap > np.float32(0.0):
                cap(here, wide, scale, softcap)
            hide_others(here, wide, seen[index, 0] - start, seen[index, 1] - start)
            above = max(most[index], highest(here, wide) * steps)
            if above == -np.inf:  # it has seen nothing yet
                to_short_powers(shorts[index].ctypes.data, here, wide, steps, np.float32(0.0))
                continue
            if start and above > most[index]:
                less = np.exp2(most[index] - above)
                total[index] *= less
                for place in range(sums.shape[1]):
                    sums[index, place] *= less
            most[index] = above
            total[index] += to_short_powers(shorts[index].ctypes.data, here, wide, steps, above)
        for panel in range(0, wide, _AT_ONCE):
            first = start // WIDTH + panel
            there = lanes[:, first : first + min(_AT_ONCE, wide - panel)]
            _add_values(sums, shorts[:, panel * WIDTH // 2 :], there, rows)
    for index in range(rows):
        share = np.float32(1.0) / total[index]
        for place in range(sums.shape[1]):
            sums[index, place] *= share


def attending(workspace: Any, attend_rows: Any, tile_size: Any) -> Any:
    """The part of `_attend` that computes `TOGETHER` tiles of queries, each of one head, one after the other in the
    same room, by these two functions."""

    @inner
    def attend_some(
        chunk: Any, out: Any, query: Any, panels: Any, lanes: Any, segments: Any, tiles: Any, group: Any, scale: Any
    ) -> None:
        words, count = out.shape[2], len(tiles)
        room, seen = workspace(panels, lanes, words), np.zeros((tile_size, 2), np.int64)
        sums, numbers = room[0], room[-1]
        place_of_first, apart, heads_apart = query
        for task in range(chunk * TOGETHER, min((chunk + 1) * TOGETHER, out.shape[1] * count)):
            head, tile = task // count, task % count
            segment, row = tiles[tile, 0], tiles[tile, 1]
            begin, end, base = segments[segment, 0], segments[segment, 1], segments[segment, 2]
            known, shared = end - begin, head // group
            rows = min(tile_size, end - row)
            seen[:, 1] = known
            there = slice(base, base + (known + WIDTH - 1) // WIDTH)
            first_query, first_out = place_of_first + row * apart + head * heads_apart, out[row, head].ctypes.data
            for index in range(rows):
                place = numbers.ctypes.data + index * numbers.strides[0]
                fill(place, first_query + index * apart, words, panels.shape[2])
            attend_rows(room, panels[shared, there], lanes[shared, :, there], seen[:rows], scale, np.float32(0.0))
            for index in range(rows):
                place = sums.ctypes.data + index * sums.strides[0]
                round_numbers(first_out + index * out.strides[0], place, 2 * words)

    return attend_some


_attend_some = attending(workspace, attend_rows, TILE)


def _attend(out: Any, query: Any, panels: Any, lanes: Any, segments: Any, tiles: Any, group: Any, scale: Any) -> None:
    """out and query [n, heads, words] of two bfloat16 each, the query given as `_Place`; `group` heads share one KV
    head. segments int64 [s, 3]: the begin, end and first panel of each; begins int64 [p, 2] and tiles int64 [t, 2]: the
    segment and first place of each panel or tile. `scale` includes log2 e."""
    count = out.shape[1] * len(tiles)
    given = out, query, panels, lanes, segments, tiles, group, scale
    parallel_for(_attend_some, given, (count + TOGETHER - 1) // TOGETHER)


_pack_kernel, _attend_kernel = (threaded(each, [vectors, lines]) for each in (_pack, _attend))
_Place = tuple[int, int, int]
"""An address, bytes from a row to the next, and from a head: an array's type would say how it lies, and each layout
have a kernel of its own."""
_place, _table = numba.types.UniTuple(numba.intp, 3), numba.int64[:, ::1]
_panels, _lanes = numba.uint32[:, :, :, ::1], numba.uint32[:, :, :, :, ::1]
TYPED = {
    "pack": Typed(_pack_kernel, (_panels, _lanes, _place, _place, numba.intp, _table, _table)),
    "attend": Typed(
        _attend_kernel,
        (numba.uint32[:, :, ::1], _place, _panels, _lanes, _table, _table, numba.intp, numba.float32),
    ),
}
KERNELS = tuple(f"{__name__}:{name}" for name in TYPED)
"""Their names, as `common.cpu.jit.find` takes them."""


def room(heads: int, count: int, dim: int) -> tuple[Array, Array]:
    """Panels uint32 [heads, count, padded, 64] and lanes [heads, count, parts, 32, width] for an even dim; words are
    padded to a multiple of 16, so that whole vectors can be written."""
    vectors = -(-dim // LANES)
    parts = -(-vectors // _WIDEST)
    width = max(2, -(-vectors // parts)) * LANES
    padded = -(-max(dim, parts * width) // (2 * LANES)) * LANES
    return (
        lined_up((heads, count, padded, WIDTH), np.uint32),
        lined_up((heads, parts, count, WIDTH // 2, width), np.uint32),
    )


class PairAttention:
    """Full attention within segments of the given lengths, the same in all layers of a pass."""

    _tile: ClassVar[int] = TILE
    _kernel: ClassVar[Any] = staticmethod(_attend_kernel)

    def __init__(self, lengths: Sequence[int]) -> None:
        segments: list[tuple[int, int, int]] = []
        begins: list[tuple[int, int]] = []
        tiles: list[tuple[int, int]] = []
        begin = 0
        for index, length in enumerate(lengths):
            end = begin + length
            segments.append((begin, end, len(begins)))
            begins += [(index, first) for first in range(begin, end, WIDTH)]
            tiles += [(index, first) for first in range(begin, end, self._tile)]
            begin = end
        self._segments, self._begins, self._tiles = (np.array(each, np.int64) for each in (segments, begins, tiles))
        self._room: tuple[Array, Array] | None = None

    @staticmethod
    def _packed(heads: int, count: int, dim: int) -> tuple[Array, Array]:
        return room(heads, count, dim)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v and the result are bfloat16 [n, heads, head_dim], with an even head_dim and contiguous heads; k and v
        may have fewer heads, each shared by the same number of q's."""
        heads, dim = k.shape[1:]
        query, keys, values = (_place_of(words(each)) for each in (q, k, v))
        if self._room is None:
            self._room = self._packed(heads, len(self._begins), dim)
        out = np.empty((*q.shape[:2], dim // 2), np.uint32)
        scale = np.float32(math.log2(math.e) / math.sqrt(dim))
        _pack_kernel(*self._room, keys, values, dim // 2, self._segments, self._begins)
        group = q.shape[1] // heads
        self._kernel(out, query, *self._room, self._segments, self._tiles, group, scale)
        return torch.from_numpy(out).view(torch.bfloat16)


def _place_of(x: Array) -> _Place:
    """The place of an array [n, heads, w] with contiguous words."""
    return x.ctypes.data, x.strides[0], x.strides[1]


def words(x: Tensor) -> Array:
    """bfloat16 [n, heads, dim] as uint32 [n, heads, dim / 2] over the same memory."""
    words: Array = x.view(torch.int32).numpy().view(np.uint32)
    return words
