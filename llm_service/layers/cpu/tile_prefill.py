"""Attention of many queries on a CPU over a cache in bfloat16, compiled by numba for processors with tiles (AMX): the
arithmetic of `common.cpu.tile_attention`. Queries and weights are rounded to bfloat16, scores and sums are float32."""

from __future__ import annotations

from typing import Any

import numba
from torch import Tensor

from common.cpu import lines, pair_attention, tile_attention, vectors
from common.cpu.jit import Array, Typed, inner
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_attention import TILE, TOGETHER, attend_rows, workspace
from common.cpu.vectors.llvm import LANES
from common.cpu.vectors.pairs import copy
from common.cpu.vectors.shorts import round_numbers
from llm_service.layers.cpu import pair_prefill, prefill_attention
from llm_service.layers.cpu.pair_prefill import PairPrefillAttention
from llm_service.layers.cpu.prefill_attention import tile_at


@inner
def _attend_some(
    chunk: Any, out: Any, query: Any, panels: Any, lanes: Any, tables: Any, first: Any, group: Any, rule: Any
) -> None:
    """`TOGETHER` tasks of `_attend`, each a tile of queries of a head. tables are segments, seen and tiles, `rule` is
    `scale` and `softcap`."""
    room, dim = workspace(panels, lanes), out.shape[2]
    sums, _, _, numbers = room
    tasks = panels.shape[0] * group * len(tables[2])
    for task in range(chunk * TOGETHER, min((chunk + 1) * TOGETHER, tasks)):
        head, rows, shared, packed = tile_at(task, tables, first, group, TILE)
        row = rows.start
        here = panels[shared, packed], lanes[shared, packed, 0]
        first_query, first_out = query[row, head].ctypes.data, out[row, head].ctypes.data
        for index in range(rows.stop - row):
            place = numbers.ctypes.data + index * numbers.strides[0]
            round_numbers(place, first_query + index * query.strides[0], dim)
        attend_rows(room, *here, tables[1][rows], *rule)
        for index in range(rows.stop - row):
            place = sums.ctypes.data + index * sums.strides[0]
            copy(first_out + index * out.strides[0], place, dim // LANES)
            for number in range(dim // LANES * LANES, dim):
                out[row + index, head, number] = sums[index, number]


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
    """As in `pair_prefill`, except that query is float32 [n, heads, dim], whose rows may be strided; lanes have one
    part."""
    count = panels.shape[0] * group * len(tiles)
    given = out, query, panels, lanes, (segments, seen, tiles), first, group, (scale, softcap)
    parallel_for(_attend_some, given, (count + TOGETHER - 1) // TOGETHER)


_attend_kernel = threaded(_attend, [vectors, lines, pair_attention, prefill_attention, tile_attention])
_out, _, *_others = pair_prefill.TYPED["attend"].types
TYPED = {"attend": Typed(_attend_kernel, (_out, numba.float32[:, :, :], *_others))}


class TiledPrefillAttention(PairPrefillAttention):
    """The same by tiles."""

    kernels = *PairPrefillAttention.kernels[:2], f"{__name__}:attend"
    _kernels = (pair_prefill.TYPED["pack"].kernel, _attend_kernel)
    _tile = TILE

    @staticmethod
    def _packed(heads: int, count: int, head_dim: int) -> tuple[Array, Array]:
        return tile_attention.room(heads, count, head_dim)

    @staticmethod
    def _queries(x: Tensor) -> Array:
        queries: Array = x.numpy()
        return queries
