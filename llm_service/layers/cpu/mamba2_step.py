"""Decodes one token of a Mamba-2 layer, or a token with its drafts, on a CPU, in one kernel compiled by numba. It reads
a state from memory once and writes it in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from common.cpu.jit import Array, Typed, inner
from common.cpu.routines import parallel_for, threaded
from llm_service.layers.cpu.gdn_step import _convolve, _convolve_four, _softplus, _to_silu

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@inner
def _renew(read: Any, state: Any, key: Any, query: Any, values: Any, left: Any) -> None:
    """S ← left · S + k valuesᵀ, and sets read [head_dim] to Sᵀq, for a state S [state, head_dim]. It takes four rows at
    a time, so that the sum is read and written less often."""
    read[:] = _ZERO
    whole = state.shape[0] // 4 * 4
    for row in range(0, whole, 4):
        s0, s1, s2, s3 = state[row], state[row + 1], state[row + 2], state[row + 3]
        k0, k1, k2, k3 = key[row], key[row + 1], key[row + 2], key[row + 3]
        q0, q1, q2, q3 = query[row], query[row + 1], query[row + 2], query[row + 3]
        for place in range(read.shape[0]):
            value = values[place]
            n0, n1 = left * s0[place] + k0 * value, left * s1[place] + k1 * value
            n2, n3 = left * s2[place] + k2 * value, left * s3[place] + k3 * value
            s0[place], s1[place], s2[place], s3[place] = n0, n1, n2, n3
            read[place] += q0 * n0 + q1 * n1 + q2 * n2 + q3 * n3
    for row in range(whole, state.shape[0]):
        own, number, wanted = state[row], key[row], query[row]
        for place in range(read.shape[0]):
            own[place] = left * own[place] + number * values[place]
            read[place] += wanted * own[place]


@inner
def _mix(mixed: Any, group: Any, sizes: Any, xbc: Any, before: Any, conv: Any, bias: Any, fresh: Any) -> None:
    """One group of one token: mixed [2 · state + own] becomes its B, its C and its heads' x. `before` [channels,
    width − 1] gets the token."""
    groups, state, own = sizes
    values, keys, begin = groups * own, groups * state, 0
    for start, size in ((values + group * state, state), (values + keys + group * state, state), (group * own, own)):
        stop, end = start + size, begin + size
        if conv.shape[1] == 4 and not fresh:
            _convolve_four(mixed[begin:end], xbc[start:stop], before[start:stop], conv[start:stop])
        else:
            _convolve(mixed[begin:end], xbc[start:stop], before[start:stop], conv[start:stop], fresh)
        for place in range(size):
            mixed[begin + place] += bias[start + place]
        begin = end
    _to_silu(mixed, np.empty(mixed.shape[0], np.int32))


@inner
def _gated_norm(out: Any, gate: Any, gain: Any, eps: Any) -> None:
    """out becomes gain · u / rms(u) with u = out · gate."""
    total = _ZERO
    for place in range(out.shape[0]):
        out[place] *= gate[place]
        total += out[place] * out[place]
    factor = _ONE / np.sqrt(total / np.float32(out.shape[0]) + eps)
    for place in range(out.shape[0]):
        out[place] *= factor * gain[place]


@inner
def _group(group: Any, sizes: Any, out: Any, tokens: Any, states: Any, slots: Any, fresh: Any, weights: Any) -> None:
    """One group of one sequence's tokens, with its heads, one after the other; see `_step`."""
    _, state, own = sizes
    z, xbc, dt, floors = tokens
    convolution, recurrent = states
    conv, bias, a_log, dt_bias, d, gain, eps = weights
    head_dim, count, first = recurrent.shape[3], z.shape[0], group * own
    mixed = np.empty((count, 2 * state + own), np.float32)
    for token in range(count):
        _mix(mixed[token], group, sizes, xbc[token], convolution[slots[0]], conv, bias, fresh and token == 0)
    values = np.empty(head_dim, np.float32)
    for member in range(own // head_dim):
        head = group * (own // head_dim) + member
        begin = member * head_dim
        if fresh:
            recurrent[slots[1], head] = _ZERO
        for token in range(count):
            delta = max(_softplus(dt[token, head] + dt_bias[head]), floors[token])
            x = mixed[token, 2 * state + begin : 2 * state + begin + head_dim]
            read = out[token, first + begin : first + begin + head_dim]
            for place in range(head_dim):
                values[place] = delta * x[place]
            left = np.exp(-np.exp(a_log[head]) * delta)
            key, query = mixed[token, :state], mixed[token, state : 2 * state]
            _renew(read, recurrent[slots[1], head], key, query, values, left)
            for place in range(head_dim):
                read[place] += d[head] * x[place]
    gate, wholes = np.empty(own, np.float32), np.empty(own, np.int32)
    for token in range(count):
        gate[:] = z[token, first : first + own]
        _to_silu(gate, wholes)
        _gated_norm(out[token, first : first + own], gate, gain[first : first + own], eps)


@inner
def _one(task: Any, out: Any, given: Any, states: Any, where: Any, weights: Any, groups: Any) -> None:
    """A task of `_step`."""
    (z, xbc, dt, floors), (rows, slots, fresh) = given, where
    sizes = groups, states[1].shape[2], z.shape[1] // groups
    index, group = task // groups, task % groups
    begin, end = rows[0, index], rows[1, index]
    here = z[begin:end], xbc[begin:end], dt[begin:end], floors[begin:end]
    _group(group, sizes, out[begin:end], here, states, slots[:, index], fresh[index], weights)


def _step(
    out: Any,
    z: Any,
    xbc: Any,
    dt: Any,
    floors: Any,
    convolution: Any,
    recurrent: Any,
    rows: Any,
    slots: Any,
    fresh: Any,
    conv: Any,
    bias: Any,
    a_log: Any,
    dt_bias: Any,
    d: Any,
    gain: Any,
    eps: Any,
    groups: Any,
) -> None:
    """float32 out and z [n, values], xbc [n, channels], dt [n, heads], floors [n]; convolution […, channels, width − 1]
    and recurrent [slots, heads, state, head_dim], with a slot of each for every sequence in `slots` int64 [2, s]; rows
    int64 [2, s], where the tokens of each sequence begin and end, and fresh bool [s]; conv [channels, width], bias
    [channels], a_log, dt_bias and d [heads], gain [values].

    A task is one group of one sequence; no other task reads or writes its part of the states.
    """
    given, states, where = (z, xbc, dt, floors), (convolution, recurrent), (rows, slots, fresh)
    weights = conv, bias, a_log, dt_bias, d, gain, eps
    parallel_for(_one, (out, given, states, where, weights, groups), rows.shape[1] * groups)


_kernel = threaded(_step)
_line, _rows, _pool = numba.float32[::1], numba.float32[:, ::1], numba.float32[:, :, ::1]
_PLACES = numba.int64[:, ::1], numba.int64[:, ::1], numba.boolean[::1]
TYPED = {
    "step": Typed(
        _kernel,
        (
            *(_rows, _rows, _rows, _rows, _line, _pool, numba.float32[:, :, :, ::1], *_PLACES),
            *(_rows, _line, _line, _line, _line, _line, numba.float32, numba.intp),
        ),
    )
}


def step(
    out: Array,
    given: Sequence[Array],
    floors: Array,
    states: tuple[Array, Array],
    places: tuple[Array, Array, Array],
    weights: Sequence[Array],
    eps: float,
    groups: int,
) -> None:
    """Decodes the tokens of each of s sequences in order: writes their rows of out [n, values] and updates their
    states.

    given: the fields of `Mamba2Input`, in order. floors [n]: the least Δ. states: of the convolution, and recurrent.
    places: rows int64 [2, s] (begin and end), slots int64 [2, s] in either of the states, fresh bool [s]. weights:
    those of `Mamba2Weights`, without eps. All other numbers are float32, and every array is contiguous: the kernel is
    compiled for that alone.
    """
    _kernel(out, *given, floors, *states, *places, *weights, np.float32(eps), groups)
