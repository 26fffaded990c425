"""What adapters add to a few rows, each of which may have another one, on a CPU in float32: one call of a kernel by
numba, where torch would need several products for each row."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu.jit import Array, Typed, compiled, inner

_WIDTH = 512
"""Outputs that one task adds to."""


@inner
def _shrink_row(out: Any, x: Any, a: Any, rank: Any) -> None:
    """float32 out [rank], x [inputs], a [rank or more, inputs]."""
    for row in range(rank):
        total, factors = np.float32(0.0), a[row]
        for place in range(x.shape[0]):
            total += factors[place] * x[place]
        out[row] = total


@inner
def _expand_row(out: Any, x: Any, b: Any, rank: Any, begin: Any, end: Any) -> None:
    """float32 out [outputs], x [rank], b [rank or more, outputs]."""
    # Loops that begin at 0 are compiled to vectors; where one begins elsewhere, each index might be a negative one.
    wanted, count, whole = out[begin:end], end - begin, rank // 4 * 4
    for row in range(0, whole, 4):  # what is added to is read and written once for four
        one, two, three, four = x[row], x[row + 1], x[row + 2], x[row + 3]
        first, second, third, fourth = b[row], b[row + 1], b[row + 2], b[row + 3]
        first, second, third, fourth = first[begin:end], second[begin:end], third[begin:end], fourth[begin:end]
        for place in range(count):
            both = one * first[place] + two * second[place]
            wanted[place] += both + (three * third[place] + four * fourth[place])
    for row in range(whole, rank):
        factor, factors = x[row], b[row][begin:end]
        for place in range(count):
            wanted[place] += factor * factors[place]


def _add(out: Any, x: Any, between: Any, a: Any, b: Any, slots: Any, ranks: Any, runs: Any) -> None:
    """float32 out [n, outputs], x [n, inputs], between [n, parts, rank], a [slots, parts, rank, inputs], b [slots,
    rank, outputs]; int64 slots [n], -1 for none, ranks [slots, parts], and runs [k, 3] of outputs: part, begin, end."""
    parts, pieces = a.shape[1], (out.shape[1] + _WIDTH - 1) // _WIDTH
    for task in numba.prange(len(slots) * parts):
        row, part = task // parts, task % parts
        if slots[row] >= 0:
            _shrink_row(between[row, part], x[row], a[slots[row], part], ranks[slots[row], part])
    for task in numba.prange(len(slots) * pieces):
        row, first = task // pieces, task % pieces * _WIDTH
        if slots[row] >= 0:
            for run in range(runs.shape[0]):
                part, begin, end = runs[run]
                begin, end = max(begin, first), min(end, first + _WIDTH)
                if begin < end:
                    rank = ranks[slots[row], part]
                    _expand_row(out[row], between[row, part], b[slots[row]], rank, begin, end)


_kernel = compiled(_add)
_rows, _numbers = numba.float32[:, ::1], numba.int64[:, ::1]
TYPED = {
    "add": Typed(
        _kernel,
        (
            *(_rows, _rows, numba.float32[:, :, ::1], numba.float32[:, :, :, ::1], numba.float32[:, :, ::1]),
            *(numba.int64[::1], _numbers, _numbers),
        ),
    )
}
KERNELS = frozenset({f"{__name__}:add"})


def add(out: Array, x: Array, a: Array, b: Array, slots: Array, ranks: Array, runs: Array) -> None:
    """See `LinearAdapters`: adds to out [n, outputs] in place."""
    between = np.empty((len(x), a.shape[1], a.shape[2]), np.float32)
    _kernel(out, x, between, a, b, slots, ranks, runs)
