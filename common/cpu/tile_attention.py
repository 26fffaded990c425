"""Attention within segments in bfloat16, compiled by numba for processors with tiles (AMX), with the arithmetic and the
panels of `common.cpu.pair_attention`, 32 queries at a time. A query's sums do not depend on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.cpu import lines, pair_attention, vectors
from common.cpu.jit import Array, Typed, inner
from common.cpu.lines import lined_up, zeros_lined_up
from common.cpu.pair_attention import TOGETHER, WIDTH, PairAttention, attending
from common.cpu.routines import parallel_for, threaded
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.powers import cap, hide_others
from common.cpu.vectors.softmax import STATE, begin_state, scale_rows, to_weights, write_shares
from common.cpu.vectors.tiles import BLOCK, add_tiles, configure_tiles, multiply_tiles, release_tiles

TILE = 2 * BLOCK
"""Queries that go over the keys together."""
_ROW = WIDTH * FLOAT
"""Bytes of a query's scores, and of a panel's row of words."""


@inner
def workspace(panels: Any, lanes: Any, _words: Any) -> Any:
    """Memory for one tile of queries, float32: their sums, the softmax states of both blocks, scores, and words, which
    are 0 behind a query's last one."""
    width = (lanes.shape[-1] + 2 * LANES - 1) // (2 * LANES) * 2 * LANES
    sums, states = zeros_lined_up(TILE, width), zeros_lined_up(2, STATE)
    return sums, states, zeros_lined_up(TILE, WIDTH), zeros_lined_up(TILE, panels.shape[-2])


@inner
def attend_rows(room: Any, panels: Any, lanes: Any, seen: Any, scale: Any, softcap: Any) -> None:
    """Fills the sums of `workspace` with the weighted values of the n ≤ 32 queries of one head whose words are there.
    Query i sees keys [seen[i, 0], seen[i, 1]), neither of which decreases from query to query; the keys are in panels
    [p, padded, 64], their values in lanes [1, p, 32, width]. `scale` includes log2 e, and so does `softcap`, which
    bounds scores; 0: none.

    A query may see none of the first panels.
    """
    sums, states, scores, numbers = room
    rows, width = len(seen), lanes.shape[3] // LANES
    blocks = (rows + BLOCK - 1) // BLOCK
    for block in range(blocks):
        begin_state(states[block].ctypes.data)
    begin, end = seen[0, 0] // WIDTH, (seen[rows - 1, 1] + WIDTH - 1) // WIDTH
    capped = softcap > np.float32(0.0)
    steps = np.float32(1.0) if capped else scale
    configure_tiles(BLOCK)
    for panel in range(begin, end):
        start, keys, values = panel * WIDTH, panels[panel].ctypes.data, lanes[0, panel].ctypes.data
        _score(scores, numbers, keys, blocks)
        for row in range(rows if capped else 0):
            cap(scores[row].ctypes.data, 1, scale, softcap)
        if seen[rows - 1, 0] > start or seen[0, 1] < start + WIDTH:
            for row in range(rows):
                hide_others(scores[row].ctypes.data, 1, seen[row, 0] - start, seen[row, 1] - start)
        # The operands of the next product are prefetched while powers are computed: values, and the keys of the next
        # panel.
        following = panels[min(panel + 1, end - 1)].ctypes.data
        for block in range(blocks):
            here, state = scores[block * BLOCK :].ctypes.data, states[block].ctypes.data
            coming = (values, 2 * width) if block == 0 else (following, numbers.shape[1] // 4)
            if to_weights(here, _ROW, state, steps, coming) and panel > begin:
                scale_rows(sums[block * BLOCK :].ctypes.data, sums.strides[0], width, state)
        _add_values(sums, scores, values, width, blocks, panel > begin)
    release_tiles()
    for block in range(blocks):
        state = states[block].ctypes.data
        write_shares(state)
        scale_rows(sums[block * BLOCK :].ctypes.data, sums.strides[0], sums.shape[1] // LANES, state)


@inner
def _score(scores: Any, numbers: Any, keys: Any, blocks: Any) -> None:
    """scores [32, 64] = numbers [32, padded] · a panel of keys, of one block of rows or two."""
    steps = numbers.shape[1] // BLOCK
    out, x = (scores.ctypes.data, _ROW), (numbers.ctypes.data, numbers.strides[0])
    if blocks == 1:
        multiply_tiles(1, 4, 0, (*out, *x, keys, _ROW, 0), steps)
        return
    multiply_tiles(2, 2, 0, (*out, *x, keys, _ROW, 0), steps)
    multiply_tiles(2, 2, 0, (out[0] + 2 * LINE, _ROW, *x, keys + 2 * LINE, _ROW, 0), steps)


@inner
def _add_values(sums: Any, weights: Any, values: Any, width: Any, blocks: Any, more: Any) -> None:
    """sums [32, 16 · width or more] = weights (words in the first half of [32, 64]) · values [32, 16 · width] of a
    panel, added to the previous sums if `more`."""
    step, size = sums.strides[0], width * LINE
    for part in range(0, width, 2):
        places = (
            *(sums.ctypes.data + part * LINE, step, weights.ctypes.data, _ROW),
            *(values + part * LINE, size, 0),
        )
        if part + 1 == width:
            if more:
                add_tiles(2, 1, 0, places, 2)
            else:
                multiply_tiles(2, 1, 0, places, 2)
        elif blocks == 1:
            if more:
                add_tiles(1, 2, 0, places, 2)
            else:
                multiply_tiles(1, 2, 0, places, 2)
        elif more:
            add_tiles(2, 2, 0, places, 2)
        else:
            multiply_tiles(2, 2, 0, places, 2)


_attend_some = attending(workspace, attend_rows, TILE)


def _attend(out: Any, query: Any, panels: Any, lanes: Any, segments: Any, tiles: Any, group: Any, scale: Any) -> None:
    """As in `pair_attention`; lanes have one part."""
    count = out.shape[1] * len(tiles)
    given = out, query, panels, lanes, segments, tiles, group, scale
    parallel_for(_attend_some, given, (count + TOGETHER - 1) // TOGETHER)


_attend_kernel = threaded(_attend, [vectors, lines, pair_attention])
TYPED = {"attend": Typed(_attend_kernel, pair_attention.TYPED["attend"].types)}
KERNELS = (f"{pair_attention.__name__}:pack", f"{__name__}:attend")
"""Their names, as `common.cpu.jit.find` takes them."""


def room(heads: int, count: int, dim: int) -> tuple[Array, Array]:
    """As `pair_attention.room`; lanes have one part, of any number of vectors."""
    vectors = -(-dim // LANES)
    padded = -(-vectors // 2) * LANES
    return (
        lined_up((heads, count, padded, WIDTH), np.uint32),
        lined_up((heads, 1, count, WIDTH // 2, vectors * LANES), np.uint32),
    )


class TiledAttention(PairAttention):
    """The same by tiles."""

    _tile, _kernel = TILE, staticmethod(_attend_kernel)

    @staticmethod
    def _packed(heads: int, count: int, dim: int) -> tuple[Array, Array]:
        return room(heads, count, dim)
