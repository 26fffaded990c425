"""A dense layer before its mixer and behind it, in two kernels compiled by numba. Their threads start once for all
products and what lies in between (`common.cpu.phases`). Weights lie in panels of any form that `layer_products` knows.
A row's result is the same to the bit in any batch."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from common.cpu import panel_tasks, phases, tile_kernel, vectors, weight_panels
from common.cpu.jit import Array, Typed, inner, threads_used
from common.cpu.panel_tasks import SIZE, count_tasks, task_at
from common.cpu.phases import counts_of, done, take, wait
from common.cpu.routines import parallel_for, threaded
from common.cpu.tile_kernel import ask_share
from common.cpu.vectors.llvm import FLOAT
from common.cpu.vectors.norms import add_rows, rms_norm
from llm_service.layers.cpu import layer_products, pair_kernel, panel_kernel, quad_kernel, row_kernels
from llm_service.layers.cpu.layer_products import (
    PanelForm,
    multiply,
    multiply_gates,
    opened_like,
    pack,
    pack_opened,
    packed_like,
    packs_opened,
)
from llm_service.layers.cpu.row_kernels import qk_norm_rotary_row


@inner
def _pack_normed(packed: Any, row: Any, x: Any, norm: Any) -> None:
    """A row of `packed` of x [k], normed, `norm` a gain and its eps, unless the gain is [0]."""
    gain, eps = norm
    bits, whole = np.empty((1, x.shape[0]), np.uint32), x.view(np.uint32)
    if len(gain):
        rms_norm(bits.ctypes.data, x.ctypes.data, gain.ctypes.data, x.shape[0], eps)
    else:
        for place in range(x.shape[0]):
            bits[0, place] = whole[place]
    pack(packed, row, bits, 0)


@inner
def _multiply_all(counts: Any, phase: Any, thread: Any, out: Any, packed: Any, weight: Any, size: Any) -> None:
    """Products: out [m, outputs]."""
    rows, panels = out.shape[0], weight[0].shape[0]
    tasks = count_tasks(rows, panels, size)
    task = take(counts, phase, thread, tasks)
    while task >= 0:
        multiply(out, packed, weight, task_at(task, rows, panels, size))
        done(counts, phase)
        task = take(counts, phase, thread, tasks)


@inner
def _gate_all(
    counts: Any, phase: Any, thread: Any, opened: Any, packed: Any, weight: Any, rows: Any, silu: Any, size: Any
) -> None:
    """Packs the products of gates and values, for panels whose first half are gates."""
    half = weight[0].shape[0] // 2
    tasks = count_tasks(rows, half, size)
    task = take(counts, phase, thread, tasks)
    while task >= 0:
        multiply_gates(opened, packed, weight, task_at(task, rows, half, size), silu)
        done(counts, phase)
        task = take(counts, phase, thread, tasks)


@inner
def _work_before(
    thread: Any, counts: Any, outs: Any, packed: Any, given: Any, norm: Any, weight: Any, rotary: Any, size: Any
) -> None:
    """One thread's part of `_before`."""
    (total, heads, rotated), (x, residual), (cosine, sine, gains, queries, eps) = outs, given, rotary
    rows, panels = x.shape[0], weight[0]
    ask_share(counts, thread, panels)
    row = take(counts, 0, thread, rows)
    while row >= 0:
        if len(residual):
            add_rows(total[row].ctypes.data, x[row].ctypes.data, residual[row].ctypes.data, x.shape[1])
            _pack_normed(packed, row, total[row], norm)
        else:
            _pack_normed(packed, row, x[row], norm)
        done(counts, 0)
        row = take(counts, 0, thread, rows)
    wait(counts, 0, rows)
    _multiply_all(counts, 1, thread, heads, packed, weight, size)
    wait(counts, 1, count_tasks(rows, panels.shape[0], size))
    row = take(counts, 2, thread, rows)
    while row >= 0:
        every, apart = heads[row].ctypes.data, rotated.shape[2] * FLOAT
        qk_norm_rotary_row(rotated[row], every, apart, cosine[row, 0], sine[row, 0], gains, queries, eps)
        row = take(counts, 2, thread, rows)


def _before(
    total: Any,
    heads: Any,
    rotated: Any,
    x: Any,
    residual: Any,
    gain: Any,
    eps: Any,
    weight: Any,
    like: Any,
    cosine: Any,
    sine: Any,
    gains: Any,
    queries: Any,
    head_eps: Any,
    size: Any,
    threads: Any,
) -> None:
    """float32 total, x and residual [n, hidden], or residual [0, 1], and total is not filled; heads [n, outputs];
    rotated [n, heads, dim]; the others as `before` and `qk_norm_rotary` in `row_kernels` have them; `size` rows and
    panels of a task."""
    counts = counts_of(3, threads)
    packed = packed_like(like, x.shape[0], weight[0])
    outs, rotary = (total, heads, rotated), (cosine, sine, gains, queries, head_eps)
    parallel_for(_work_before, (counts, outs, packed, (x, residual), (gain, eps), weight, rotary, size), threads)


@inner
def _work_behind(
    thread: Any, counts: Any, outs: Any, packed: Any, given: Any, weights: Any, norms: Any, silu: Any, sizes: Any
) -> None:
    """One thread's part of `_behind`."""
    (out, joined, projected), (mixed, residual), (o, gate_up, down) = outs, given, weights
    (packed_mixed, packed_joined, opened), (out_norm, norm), (o_size, gate_size, down_size) = packed, norms, sizes
    rows = mixed.shape[0]
    ask_share(counts, thread, o[0])
    row = take(counts, 0, thread, rows)
    while row >= 0:
        pack(packed_mixed, row, mixed, row)
        done(counts, 0)
        row = take(counts, 0, thread, rows)
    wait(counts, 0, rows)
    _multiply_all(counts, 1, thread, projected, packed_mixed, o, o_size)
    ask_share(counts, thread, gate_up[0])
    wait(counts, 1, count_tasks(rows, o[0].shape[0], o_size))
    row = take(counts, 2, thread, rows)
    while row >= 0:
        made = projected[row].ctypes.data
        if len(out_norm[0]):
            rms_norm(made, made, out_norm[0].ctypes.data, joined.shape[1], out_norm[1])
        add_rows(joined[row].ctypes.data, made, residual[row].ctypes.data, joined.shape[1])
        _pack_normed(packed_joined, row, joined[row], norm)
        done(counts, 2)
        row = take(counts, 2, thread, rows)
    wait(counts, 2, rows)
    _gate_all(counts, 3, thread, opened, packed_joined, gate_up, rows, silu, gate_size)
    ask_share(counts, thread, down[0])
    wait(counts, 3, count_tasks(rows, gate_up[0].shape[0] // 2, gate_size))
    if packs_opened(opened):
        row = take(counts, 5, thread, rows)
        while row >= 0:
            pack_opened(opened, row)
            done(counts, 5)
            row = take(counts, 5, thread, rows)
        wait(counts, 5, rows)
    _multiply_all(counts, 4, thread, out, opened, down, down_size)


def _behind(
    out: Any,
    joined: Any,
    mixed: Any,
    residual: Any,
    o: Any,
    gate_up: Any,
    down: Any,
    like: Any,
    out_gain: Any,
    out_eps: Any,
    gain: Any,
    eps: Any,
    silu: Any,
    o_size: Any,
    gate_size: Any,
    down_size: Any,
    threads: Any,
) -> None:
    """float32 out, joined and residual [n, hidden], mixed [n, k] as bits, the others as in `behind`; sizes are rows and
    panels of a task."""
    rows = mixed.shape[0]
    counts, projected = counts_of(6, threads), np.empty(joined.shape, np.float32)
    packed_mixed, packed_joined = packed_like(like, rows, o[0]), packed_like(like, rows, gate_up[0])
    opened = opened_like(like, rows, down[0])
    outs, packed = (out, joined, projected), (packed_mixed, packed_joined, opened)
    weights, norms = (o, gate_up, down), ((out_gain, out_eps), (gain, eps))
    sizes = o_size, gate_size, down_size
    parallel_for(_work_behind, (counts, outs, packed, (mixed, residual), weights, norms, silu, sizes), threads)


_MADE_OF = [
    *(vectors, panel_tasks, phases, tile_kernel, weight_panels, layer_products),
    *(pair_kernel, panel_kernel, quad_kernel, row_kernels),
]
_number, _rows, _heads, _vector = numba.float32, numba.float32[:, ::1], numba.float32[:, :, ::1], numba.float32[::1]


_FORMS = {
    ("tiles", "uint64"): [],
    ("pairs", "uint64"): [pair_kernel.SUM],
    ("quads", "uint32"): [quad_kernel.SUM],
    **{("numbers", str(kind)): [routine] for kind, routine in panel_kernel.SUMS.items()},
}
"""By the form of the panels and their dtype: the routine that sums a panel's products."""
_KERNELS = {
    named: (threaded(_before, _MADE_OF, calls), threaded(_behind, _MADE_OF, calls)) for named, calls in _FORMS.items()
}


def _typed(form: str, stored: str) -> dict[str, Typed]:
    weight, like = (
        numba.types.Tuple((numba.from_dtype(np.dtype(stored))[:, :, ::1], _vector, _vector)),
        layer_products.LIKE[form],
    )
    before = (
        *(_rows, _rows, _heads, _rows, _rows, _vector, _number, weight, like),
        *(_heads, _heads, _rows, numba.intp, _number, SIZE, numba.intp),
    )
    behind = (
        *(_rows, _rows, numba.uint32[:, ::1], _rows, weight, weight, weight, like),
        *(_vector, _number, _vector, _number, numba.boolean, SIZE, SIZE, SIZE, numba.intp),
    )
    kernels = zip(("before", "behind"), _KERNELS[form, stored], (before, behind), strict=True)
    return {f"{half}_{form}_{stored}": Typed(kernel, types) for half, kernel, types in kernels}


TYPED = {name: kernel for named in _FORMS for name, kernel in _typed(*named).items()}
_NO_ROWS = np.empty((0, 1), np.float32)

Weight = tuple[Array, Array, Array]
"""Panels, a scale and a bias, float32 [outputs] or [0]; of quads they are as `QuadPanels` has them."""


def names(form: str, panels: Array) -> frozenset[str]:
    """The kernels for panels of a form, as `common.cpu.jit.find` takes them."""
    return frozenset(f"{__name__}:{half}_{form}_{panels.dtype}" for half in ("before", "behind"))


def before(
    x: Array,
    residual: Array | None,
    norm: tuple[Array, float],
    weight: Weight,
    form: PanelForm,
    rotary: tuple[Array, Array],
    sizes: tuple[int, int, int, int],
    gains: tuple[Array, float],
) -> tuple[Array, Array, Array]:
    """Takes float32 x [n, hidden] and the residual. Returns their sum; rotated queries and keys, [n, heads + keys,
    head_dim]; and the projections of all heads, [n, outputs].

    `norm` is a gain [hidden], or [0] for none, with its eps; `rotary` cosine and sine [n, 1, rotary_dim]; `sizes`
    outputs, query heads, key heads and head_dim; `gains` as `both_gains` gives them.
    """
    outputs, queries, keys, head_dim = sizes
    threads, rows, shape = threads_used(), len(x), weight[0].shape[:2]
    heads = np.empty((rows, outputs), np.float32)
    rotated = np.empty((rows, queries + keys, head_dim), np.float32)
    total = x if residual is None else np.empty(x.shape, np.float32)
    for begin in range(0, rows, form.at_once):
        here = slice(begin, begin + form.at_once)
        more = _NO_ROWS if residual is None else residual[here]
        _KERNELS[form.name, weight[0].dtype.name][0](
            *(total[here], heads[here], rotated[here], x[here], more, norm[0], np.float32(norm[1]), weight, form.like),
            *(rotary[0][here], rotary[1][here], gains[0], queries, np.float32(gains[1])),
            *(_size_of(form, len(x[here]), *shape, 1, threads), threads),
        )
    return total, rotated, heads


def behind(
    mixed: Array,
    residual: Array,
    norms: tuple[Array, float, Array, float],
    weights: tuple[Weight, Weight, Weight],
    form: PanelForm,
    *,
    silu: bool,
) -> tuple[Array, Array]:
    """Takes float32 mixed [n, heads · head_dim] and residual [n, hidden]. Returns the output of the feed-forward part,
    and the sum that went into its norm, [n, hidden] each.

    `norms` are the gain, [hidden] or [0], and eps of the projected rows, and those of the sum; `weights` are the output
    projection, gate and up in the two halves of each panel, and down; the activation of gates is `silu`, or else gelu's
    tanh approximation.
    """
    rows, threads = len(mixed), threads_used()
    out, joined = (np.empty(residual.shape, np.float32) for _ in range(2))
    out_gain, out_eps, gain, eps = norms
    shapes = [weight[0].shape[:2] for weight in weights]
    for begin in range(0, rows, form.at_once):
        here = slice(begin, begin + form.at_once)
        count = len(mixed[here])
        sizes = (_size_of(form, count, *shape, each, threads) for shape, each in zip(shapes, (1, 2, 1), strict=True))
        _KERNELS[form.name, weights[0][0].dtype.name][1](
            *(out[here], joined[here], mixed[here].view(np.uint32), residual[here], *weights, form.like),
            *(out_gain, np.float32(out_eps), gain, np.float32(eps), silu, *sizes, threads),
        )
    return out, joined


@functools.lru_cache(4096)
def _size_of(form: PanelForm, rows: int, panels: int, inputs: int, each: int, threads: int) -> tuple[int, int]:
    return form.size(rows, panels, inputs, each, threads)
