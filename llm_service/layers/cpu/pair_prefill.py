"""Attention of many queries on a CPU over a cache in bfloat16, compiled by numba for processors with AVX512-BF16: the
arithmetic of `common.cpu.pair_attention`. Queries and weights are rounded to bfloat16, scores and sums are float32."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import lines, pair_attention, vectors
from common.cpu.jit import Array, Typed, compiled, inner
from common.cpu.pair_attention import TILE, TOGETHER, WIDTH, attend_rows, fill_row, pack_panel, workspace
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import LANES
from common.cpu.vectors.pairs import copy
from common.cpu.vectors.shorts import round_numbers
from llm_service.layers.cpu import prefill_attention
from llm_service.layers.cpu.prefill_attention import PrefillAttention, tile_at


@inner
def _pack_one(
    task: Any, panels: Any, lanes: Any, keys: Any, values: Any, places: Any, segments: Any, begins: Any, first: Any
) -> None:
    """A panel of `_pack`."""
    count, padded = len(begins), panels.shape[2]
    head, panel = task // count, task % count
    segment, begin = begins[panel]
    here = segments[segment, 2] + begin
    end = here + min(WIDTH, segments[segment, 3] - begin)
    known, worth = np.empty((WIDTH, padded), np.uint32), np.empty((WIDTH, padded), np.uint32)
    known[end - here :], worth[end - here :] = np.uint32(0), np.uint32(0)
    for place in range(here, end):
        fill_row(known[place - here], keys[places[place], first + head])
        fill_row(worth[place - here], values[places[place], first + head])
    pack_panel(panels[head, panel], lanes[head, :, panel], known, worth)


def _pack(panels: Any, lanes: Any, keys: Any, values: Any, places: Any, segments: Any, begins: Any, first: Any) -> None:
    """Fills uint32 panels [heads, p, padded, 64] with the keys of the KV heads from `first` on, and lanes [heads,
    parts, p, 32, width] with their values, both padded with zeros behind a segment's last key; keys and values [slots,
    kv_heads, words]. The others are as in `PrefillMetadata` and `PrefillAttention`."""
    given = panels, lanes, keys, values, places, segments, begins, first
    parallel_for(_pack_one, given, panels.shape[0] * len(begins))


def _write(keys: Any, values: Any, key: Any, value: Any, places: Any) -> None:
    """Rounds float32 key and value [n, kv_heads, dim] into int16 keys and values [slots, kv_heads, dim] at the given
    slots."""
    for row in numba.prange(len(places)):
        for head in range(key.shape[1]):
            of_key, of_value = key[row, head], value[row, head]
            round_numbers(keys[places[row], head].ctypes.data, of_key.ctypes.data, key.shape[2])
            round_numbers(values[places[row], head].ctypes.data, of_value.ctypes.data, key.shape[2])


def attending(workspace: Any, attend_rows: Any, tile_size: Any) -> Any:
    """The part of `_attend` that computes `TOGETHER` tiles of queries, each of one head, one after the other in the
    same room, by these two functions. tables are segments, seen and tiles, `rule` is `scale` and `softcap`."""

    @inner
    def attend_some(
        chunk: Any, out: Any, query: Any, panels: Any, lanes: Any, tables: Any, first: Any, group: Any, rule: Any
    ) -> None:
        dim = out.shape[2]
        room = workspace(panels, lanes, dim // 2)
        sums, numbers = room[0], room[-1]
        tasks = panels.shape[0] * group * len(tables[2])
        for task in range(chunk * TOGETHER, min((chunk + 1) * TOGETHER, tasks)):
            head, rows, shared, packed = tile_at(task, tables, first, group, tile_size)
            row = rows.start
            first_query, first_out = query[row, head].ctypes.data, out[row, head].ctypes.data
            for index in range(rows.stop - row):
                place = numbers.ctypes.data + index * numbers.strides[0]
                round_numbers(place, first_query + index * query.strides[0], dim)
            attend_rows(room, panels[shared, packed], lanes[shared, :, packed], tables[1][rows], *rule)
            for index in range(rows.stop - row):
                place = sums.ctypes.data + index * sums.strides[0]
                copy(first_out + index * out.strides[0], place, dim // LANES)
                for number in range(dim // LANES * LANES, dim):
                    out[row + index, head, number] = sums[index, number]

    return attend_some


_attend_some = attending(workspace, attend_rows, TILE)


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
    """float32 out and query [n, heads, dim]; the query's rows may be strided. It computes the query heads that share
    the KV heads from `first` on, `group` each. `scale` and `softcap` include log2 e. panels and lanes are as in
    `_pack`, the others as in `PrefillMetadata`."""
    count = panels.shape[0] * group * len(tiles)
    given = out, query, panels, lanes, (segments, seen, tiles), first, group, (scale, softcap)
    parallel_for(_attend_some, given, (count + TOGETHER - 1) // TOGETHER)


_made_of = [vectors, lines, pair_attention, prefill_attention]
_pack_kernel, _attend_kernel = threaded(_pack, _made_of), threaded(_attend, _made_of)
_write_kernel = compiled(_write, made_of=_made_of)
_words, _panels, _lanes = numba.uint32[:, :, ::1], numba.uint32[:, :, :, ::1], numba.uint32[:, :, :, :, ::1]
_list, _table = numba.int64[::1], numba.int64[:, ::1]
_slots, _heads = numba.int16[:, :, ::1], numba.float32[:, :, :]
TYPED = {
    "write": Typed(_write_kernel, (_slots, _slots, _heads, _heads, _list)),
    "pack": Typed(_pack_kernel, (_panels, _lanes, _words, _words, _list, _table, _table, numba.intp)),
    "attend": Typed(
        _attend_kernel,
        (
            *(numba.float32[:, :, ::1], numba.float32[:, :, :], _panels, _lanes, _table, _table, _table),
            *(numba.intp, numba.intp, numba.float32, numba.float32),
        ),
    ),
}


class PairPrefillAttention(PrefillAttention):
    """The same for an even head_dim and a cache in bfloat16."""

    kernels = f"{__name__}:write", f"{__name__}:pack", f"{__name__}:attend"
    _kernels = (_pack_kernel, _attend_kernel)

    def write(self, places: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """As in `PrefillAttention`."""
        cached = (each.view(torch.int16).numpy() for each in (keys, values))
        _write_kernel(*cached, key.numpy(), value.numpy(), places.numpy())

    @staticmethod
    def _packed(heads: int, count: int, head_dim: int) -> tuple[Array, Array]:
        return pair_attention.room(heads, count, head_dim)

    @staticmethod
    def _numbers(x: Tensor) -> Array:
        return pair_attention.words(x)

    @classmethod
    def _queries(cls, x: Tensor) -> Array:
        queries: Array = x.numpy()
        return queries
