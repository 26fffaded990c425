"""Attention of many queries on a CPU over a cache in bfloat16, compiled by numba for processors with tiles (AMX): the
arithmetic of `common.cpu.tile_attention`. Queries and weights are rounded to bfloat16, scores and sums are float32."""

from __future__ import annotations

from typing import Any

from common.cpu import lines, pair_attention, tile_attention, vectors
from common.cpu.jit import Array, Typed
from common.cpu.pair_attention import TOGETHER
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_attention import TILE, attend_rows, workspace
from llm_service.layers.cpu import pair_prefill, prefill_attention
from llm_service.layers.cpu.pair_prefill import PairPrefillAttention, attending

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
    """As in `pair_prefill`; lanes have one part."""
    count = panels.shape[0] * group * len(tiles)
    given = out, query, panels, lanes, (segments, seen, tiles), first, group, (scale, softcap)
    parallel_for(_attend_some, given, (count + TOGETHER - 1) // TOGETHER)


_attend_kernel = threaded(_attend, [vectors, lines, pair_attention, prefill_attention, tile_attention])
TYPED = {"attend": Typed(_attend_kernel, pair_prefill.TYPED["attend"].types)}


class TiledPrefillAttention(PairPrefillAttention):
    """The same by tiles."""

    kernels = *PairPrefillAttention.kernels[:2], f"{__name__}:attend"
    _kernels = (pair_prefill.TYPED["pack"].kernel, _attend_kernel)
    _tile = TILE

    @staticmethod
    def _packed(heads: int, count: int, head_dim: int) -> tuple[Array, Array]:
        return tile_attention.room(heads, count, head_dim)
