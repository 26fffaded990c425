"""A token of Kimi Delta Attention on a CPU, or one with its drafts, in one kernel that numba compiles: as `gdn_step`,
but that each row of a state fades by itself, and gates are sigmoids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from common.cpu.jit import Array, Typed, inner
from common.cpu.routines import parallel_for, threaded
from llm_service.layers.cpu.gdn_step import (
    _begin,
    _convolve,
    _convolve_four,
    _gated_norm,
    _recall,
    _softplus,
    _to_silu,
    _to_unit,
)

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@inner
def _sigmoid(x: Any) -> Any:
    return _ONE / (_ONE + np.exp(-x))


@inner
def _write_rows(state: Any, left: Any, key: Any, change: Any) -> None:
    """S ← diag(left) · S + k changeᵀ."""
    for row in range(state.shape[0]):
        share, number, own = left[row], key[row], state[row]
        for place in range(own.shape[0]):
            own[place] = share * own[place] + number * change[place]


@inner
def _fade(left: Any, a: Any, dt_bias: Any, rate: Any, least: Any) -> None:
    """left [head_dim] becomes e^g; `least` above 0: g has no bound."""
    for place in range(left.shape[0]):
        moved = a[place] + dt_bias[place]
        g = -rate * _softplus(moved) if least > _ZERO else least * _sigmoid(rate * moved)
        left[place] = np.exp(g)


@inner
def _mix(mixed: Any, first: Any, values: Any, qkv: Any, before: Any, conv: Any, fresh: Any) -> None:
    """One head of one token: mixed [3, head_dim] becomes its query and its key, of the length that they have, and its
    values. `before` [channels, width − 1] gets the token."""
    size = mixed.shape[1]
    for part in range(3):
        start = part * values + first
        stop = start + size
        if conv.shape[1] == 4 and not fresh:
            _convolve_four(mixed[part], qkv[start:stop], before[start:stop], conv[start:stop])
        else:
            _convolve(mixed[part], qkv[start:stop], before[start:stop], conv[start:stop], fresh)
        _to_silu(mixed[part], np.empty(size, np.int32))
    _to_unit(mixed[0], np.float32(size) ** np.float32(-0.5))
    _to_unit(mixed[1], _ONE)


@inner
def _change(read: Any, state: Any, mixed: Any, left: Any, beta: Any, fresh: Any) -> None:
    """Updates a head's state by one token, and sets `read` [head_dim] to its output. The decay is applied to keys and
    queries where they meet the old state."""
    query, key, value = mixed[0], mixed[1], mixed[2]
    size = value.shape[0]
    change = np.empty(size, np.float32)
    shared = _ZERO
    for place in range(size):
        shared += key[place] * query[place]
    if fresh:
        for place in range(size):
            change[place] = beta * value[place]
            read[place] = shared * change[place]
        _begin(state, key, change)
        return
    _recall(change, read, state, left * key, left * query)
    for place in range(size):
        change[place] = beta * (value[place] - change[place])
        read[place] += shared * change[place]
    _write_rows(state, left, key, change)


@inner
def _head(head: Any, out: Any, tokens: Any, states: Any, slots: Any, fresh: Any, weights: Any) -> None:
    """One head of one sequence's tokens, one after the other; see `_step`."""
    qkv, z, a, b = tokens
    convolution, recurrent = states
    conv, a_log, dt_bias, gain, eps, least = weights
    size, values = gain.shape[0], out.shape[1]
    first, rate = head * size, np.exp(a_log[head])
    mixed, left = np.empty((3, size), np.float32), np.empty(size, np.float32)
    read, gate = np.empty(size, np.float32), np.empty(size, np.float32)
    for token in range(qkv.shape[0]):
        begins = fresh and token == 0
        own = slice(first, first + size)
        _mix(mixed, first, values, qkv[token], convolution[slots[0]], conv, begins)
        _fade(left, a[token, own], dt_bias[own], rate, least)
        for place in range(size):
            gate[place] = _sigmoid(z[token, first + place])
        _change(read, recurrent[slots[1], head], mixed, left, _sigmoid(b[token, head]), begins)
        _gated_norm(out[token, own], read, gate, gain, eps)


@inner
def _one(task: Any, out: Any, given: Any, states: Any, where: Any, weights: Any) -> None:
    """A task of `_step`."""
    (qkv, z, a, b), (rows, slots, fresh), heads = given, where, states[1].shape[1]
    index, head = task // heads, task % heads
    begin, end = rows[0, index], rows[1, index]
    here = qkv[begin:end], z[begin:end], a[begin:end], b[begin:end]
    _head(head, out[begin:end], here, states, slots[:, index], fresh[index], weights)


def _step(
    out: Any,
    qkv: Any,
    z: Any,
    a: Any,
    b: Any,
    convolution: Any,
    recurrent: Any,
    rows: Any,
    slots: Any,
    fresh: Any,
    conv: Any,
    a_log: Any,
    dt_bias: Any,
    gain: Any,
    eps: Any,
    least: Any,
) -> None:
    """float32 out, z and a [n, values], qkv [n, channels], b [n, heads]; recurrent [slots, heads, head_dim, head_dim];
    dt_bias [values]; the rest as in `gdn_step`. A task is one head of one sequence; no other task reads or writes its
    part of the states."""
    given, states, where = (qkv, z, a, b), (convolution, recurrent), (rows, slots, fresh)
    weights = conv, a_log, dt_bias, gain, eps, least
    parallel_for(_one, (out, given, states, where, weights), rows.shape[1] * recurrent.shape[1])


_kernel = threaded(_step)
_line, _rows, _pool = numba.float32[::1], numba.float32[:, ::1], numba.float32[:, :, ::1]
_PLACES = numba.int64[:, ::1], numba.int64[:, ::1], numba.boolean[::1]
TYPED = {
    "step": Typed(
        _kernel,
        (
            *(_rows, _rows, _rows, _rows, _rows, _pool, numba.float32[:, :, :, ::1], *_PLACES),
            *(_rows, _line, _line, _line, numba.float32, numba.float32),
        ),
    )
}


def step(
    out: Array,
    given: Sequence[Array],
    states: tuple[Array, Array],
    places: tuple[Array, Array, Array],
    weights: Sequence[Array],
    eps: float,
    least: float | None,
) -> None:
    """As `gdn_step.step`; given: the fields of `KdaInput`, in order. `least` is as in `KdaWeights`."""
    _kernel(out, *given, *states, *places, *weights, np.float32(eps), np.float32(1.0 if least is None else least))
