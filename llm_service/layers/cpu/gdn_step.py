"""Decodes one token of a gated delta net, or a token with its drafts, on a CPU, in one kernel compiled by numba.

Apart from weights, the state is the largest thing that a layer reads in a step. The kernel reads it from memory once,
reuses it from the cache, and writes it in place; torch reads or writes it nine times for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from common.cpu.jit import Array, Typed, inner
from common.cpu.routines import parallel_for, threaded

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_EPS = np.float32(1e-6)
"""Under the root of a head's length."""
_STEEP = np.float32(20.0)
_LOG2E = np.float32(1.0 / np.log(2.0))
_FARTHEST = np.float32(126.0)
"""An exponent of two that float32 has on both sides."""
_POWERS = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(coefficient) for coefficient in _POWERS.coef)
"""2^x between -½ and ½, interpolated at Chebyshev's points: less than 2 · 10⁻⁷ off."""


@inner
def _to_silu(x: Any, wholes: Any) -> None:
    """float32 x [n] becomes x · σ(x); int32 [n] is room. Loops without calls, so that the compiler makes vectors."""
    scales = wholes.view(np.float32)
    size = x.shape[0]
    powers = np.empty(size, np.float32)
    for place in range(size):
        power = min(max(-x[place] * _LOG2E, -_FARTHEST), _FARTHEST)
        whole = np.rint(power)
        part = power - whole
        powers[place] = ((((_C5 * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part + _C0
        wholes[place] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for place in range(size):
        x[place] = x[place] / (_ONE + powers[place] * scales[place])


@inner
def _convolve(out: Any, x: Any, before: Any, weight: Any, fresh: Any) -> None:
    """Convolution without SiLU: float32 out and x [c], before [c, width − 1], to which x is appended, weight [c,
    width]."""
    last = weight.shape[1] - 1
    for channel in range(out.shape[0]):
        if fresh:
            for place in range(last):
                before[channel, place] = _ZERO
        total = x[channel] * weight[channel, last]
        for place in range(last):
            total += before[channel, place] * weight[channel, place]
        for place in range(last - 1):
            before[channel, place] = before[channel, place + 1]
        before[channel, last - 1] = x[channel]
        out[channel] = total


@inner
def _convolve_four(out: Any, x: Any, before: Any, weight: Any) -> None:
    """The same for a width of four and a sequence that has begun. It has no inner loop, so it vectorises."""
    for channel in range(out.shape[0]):
        first, second, third, number = before[channel, 0], before[channel, 1], before[channel, 2], x[channel]
        out[channel] = (
            first * weight[channel, 0]
            + second * weight[channel, 1]
            + third * weight[channel, 2]
            + number * weight[channel, 3]
        )
        before[channel, 0], before[channel, 1], before[channel, 2] = second, third, number


@inner
def _softplus(x: Any) -> Any:
    """ln(1 + e^x); x itself where the difference is below float32's precision."""
    return x if x > _STEEP else np.log1p(np.exp(x))


@inner
def _to_unit(x: Any, scale: Any) -> None:
    """A vector becomes `scale` long."""
    total = _ZERO
    for place in range(x.shape[0]):
        total += x[place] * x[place]
    factor = scale / np.sqrt(total + _EPS)
    for place in range(x.shape[0]):
        x[place] *= factor


@inner
def _recall(known: Any, read: Any, state: Any, key: Any, query: Any) -> None:
    """Sets known and read [value_dim] to Sᵀk and Sᵀq for a state S [key_dim, value_dim]. It takes four rows at a time,
    so that both sums are read and written less often."""
    known[:], read[:] = _ZERO, _ZERO
    whole = state.shape[0] // 4 * 4
    for row in range(0, whole, 4):
        s0, s1, s2, s3 = state[row], state[row + 1], state[row + 2], state[row + 3]
        k0, k1, k2, k3 = key[row], key[row + 1], key[row + 2], key[row + 3]
        q0, q1, q2, q3 = query[row], query[row + 1], query[row + 2], query[row + 3]
        for place in range(known.shape[0]):
            known[place] += k0 * s0[place] + k1 * s1[place] + k2 * s2[place] + k3 * s3[place]
            read[place] += q0 * s0[place] + q1 * s1[place] + q2 * s2[place] + q3 * s3[place]
    for row in range(whole, state.shape[0]):
        for place in range(known.shape[0]):
            known[place] += key[row] * state[row, place]
            read[place] += query[row] * state[row, place]


@inner
def _write(state: Any, left: Any, key: Any, change: Any) -> None:
    """S ← left · S + k changeᵀ."""
    for row in range(state.shape[0]):
        number, own = key[row], state[row]
        for place in range(own.shape[0]):
            own[place] = left * own[place] + number * change[place]


@inner
def _begin(state: Any, key: Any, change: Any) -> None:
    """S ← k changeᵀ."""
    for row in range(state.shape[0]):
        number, own = key[row], state[row]
        for place in range(own.shape[0]):
            own[place] = number * change[place]


@inner
def _gated_norm(out: Any, read: Any, gate: Any, gain: Any, eps: Any) -> None:
    """out [value_dim] becomes gain · read / rms(read) · gate."""
    total = _ZERO
    for place in range(read.shape[0]):
        total += read[place] * read[place]
    factor = _ONE / np.sqrt(total / np.float32(read.shape[0]) + eps)
    for place in range(read.shape[0]):
        out[place] = read[place] * factor * gain[place] * gate[place]


@inner
def _value_head(
    out: Any,
    gate: Any,
    state: Any,
    query: Any,
    key: Any,
    value: Any,
    left: Any,
    beta: Any,
    fresh: Any,
    gain: Any,
    eps: Any,
) -> None:
    """One value head of one token: out and gate [value_dim], its state [key_dim, value_dim]."""
    size = value.shape[0]
    known, read = np.empty(size, np.float32), np.empty(size, np.float32)
    shared = _ZERO
    for place in range(key.shape[0]):
        shared += key[place] * query[place]
    if fresh:
        for place in range(size):
            known[place] = beta * value[place]
            read[place] = shared * known[place]
        _begin(state, key, known)
    else:
        _recall(known, read, state, key, query)
        for place in range(size):
            known[place] = beta * (value[place] - left * known[place])
            read[place] = left * read[place] + shared * known[place]
        _write(state, left, key, known)
    _gated_norm(out, read, gate, gain, eps)


@inner
def _mix(mixed: Any, head: Any, sizes: Any, qkv: Any, z: Any, before: Any, conv: Any, fresh: Any) -> None:
    """One key head of one token: mixed [2 · key_dim + 2 · group · value_dim] becomes its query and its key, of the
    length that they have, its values, and the gates. `before` [channels, width − 1] gets the token."""
    key_heads, key_dim, group, value_dim = sizes
    own, keys, begin = group * value_dim, key_heads * key_dim, 0
    for start, size in ((head * key_dim, key_dim), (keys + head * key_dim, key_dim), (2 * keys + head * own, own)):
        stop, end = start + size, begin + size
        if conv.shape[1] == 4 and not fresh:
            _convolve_four(mixed[begin:end], qkv[start:stop], before[start:stop], conv[start:stop])
        else:
            _convolve(mixed[begin:end], qkv[start:stop], before[start:stop], conv[start:stop], fresh)
        begin = end
    mixed[begin:] = z[head * own : (head + 1) * own]
    _to_silu(mixed, np.empty(mixed.shape[0], np.int32))
    _to_unit(mixed[:key_dim], np.float32(key_dim) ** np.float32(-0.5))
    _to_unit(mixed[key_dim : 2 * key_dim], _ONE)


@inner
def _key_head(head: Any, sizes: Any, out: Any, tokens: Any, states: Any, slots: Any, fresh: Any, weights: Any) -> None:
    """One key head of one sequence's tokens, with its value heads, one after the other: a state stays in the cache
    while it is used; see `_step`."""
    _, key_dim, group, value_dim = sizes
    qkv, z, a, b = tokens
    convolution, recurrent = states
    conv, a_log, dt_bias, gain, eps = weights
    own, count = group * value_dim, qkv.shape[0]
    mixed = np.empty((count, 2 * key_dim + 2 * own), np.float32)
    for token in range(count):
        _mix(mixed[token], head, sizes, qkv[token], z[token], convolution[slots[0]], conv, fresh and token == 0)
    for member in range(group):
        number, first = head * group + member, 2 * key_dim + member * value_dim
        for token in range(count):
            query, key = mixed[token, :key_dim], mixed[token, key_dim : 2 * key_dim]
            value, gate = mixed[token, first : first + value_dim], mixed[token, first + own : first + own + value_dim]
            place = out[token, number * value_dim : (number + 1) * value_dim]
            left = np.exp(-np.exp(a_log[number]) * _softplus(a[token, number] + dt_bias[number]))
            beta = _ONE / (_ONE + np.exp(-b[token, number]))
            begins = fresh and token == 0
            _value_head(place, gate, recurrent[slots[1], number], query, key, value, left, beta, begins, gain, eps)


@inner
def _one(task: Any, out: Any, given: Any, states: Any, where: Any, weights: Any, key_heads: Any) -> None:
    """A task of `_step`."""
    (qkv, z, a, b), (rows, slots, fresh) = given, where
    value_heads, key_dim, value_dim = states[1].shape[1:]
    sizes = key_heads, key_dim, value_heads // key_heads, value_dim
    index, head = task // key_heads, task % key_heads
    begin, end = rows[0, index], rows[1, index]
    here = qkv[begin:end], z[begin:end], a[begin:end], b[begin:end]
    _key_head(head, sizes, out[begin:end], here, states, slots[:, index], fresh[index], weights)


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
    key_heads: Any,
) -> None:
    """float32 out and z [n, values], qkv [n, channels], a and b [n, value_heads]; convolution […, channels, width − 1]
    and recurrent [slots, value_heads, key_dim, value_dim], with a slot of each for every sequence in `slots` int64 [2,
    s]; rows int64 [2, s], where the tokens of each sequence begin and end, and fresh bool [s]; conv [channels, width],
    a_log and dt_bias [value_heads], gain [value_dim].

    A task is one key head of one sequence; no other task reads or writes its part of the states.
    """
    given, states, where = (qkv, z, a, b), (convolution, recurrent), (rows, slots, fresh)
    weights = conv, a_log, dt_bias, gain, eps
    parallel_for(_one, (out, given, states, where, weights, key_heads), rows.shape[1] * key_heads)


_kernel = threaded(_step)
_line, _rows, _pool = numba.float32[::1], numba.float32[:, ::1], numba.float32[:, :, ::1]
_PLACES = numba.int64[:, ::1], numba.int64[:, ::1], numba.boolean[::1]
TYPED = {
    "step": Typed(
        _kernel,
        (
            *(_rows, _rows, _rows, _rows, _rows, _pool, numba.float32[:, :, :, ::1], *_PLACES),
            *(_rows, _line, _line, _line, numba.float32, numba.intp),
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
    key_heads: int,
) -> None:
    """Decodes the tokens of each of s sequences in order: writes their rows of out [n, values] and updates their
    states.

    given: the fields of `GdnInput`, in order. states: of the convolution, and recurrent. places: rows int64 [2, s]
    (begin and end), slots int64 [2, s] in either of the states, fresh bool [s]. weights: conv, a_log, dt_bias, gain.
    All other numbers are float32, and every array is contiguous: the kernel is compiled for that alone.
    """
    _kernel(out, *given, *states, *places, *weights, np.float32(eps), key_heads)
