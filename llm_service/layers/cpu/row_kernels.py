"""Row-wise operations of a decoder between two products, on a CPU in float32, compiled by numba, one kernel each.

torch needs five operators for a norm and ten for rotary embeddings; launching them takes longer than the arithmetic of
few rows. Few rows take microseconds, as long as waking threads takes, so one thread computes them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu import vectors
from common.cpu.jit import Array, Typed, compiled, inner
from common.cpu.vectors.llvm import FLOAT, LANES
from common.cpu.vectors.norms import add_rows, rms_norm, rotate_scaled, scale_of, scaled
from common.cpu.vectors.powers import GELU_BEND, GELU_SLOPE, gate, gelu_gate
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.selection import fused_vectors
from llm_service.layers.ops import Pair, TorchOps
from llm_service.model_config.feed_forward import Activation

FEW = 32
"""Up to so many rows one thread is faster."""


def _rms_norm(out: Any, x: Any, apart: Any, gain: Any, eps: Any) -> None:
    """float32 out [n, size]; x is the address of such rows, `apart` bytes from one to the next; gain [size]."""
    for row in numba.prange(out.shape[0]):
        rms_norm(out[row].ctypes.data, x + np.intp(row) * apart, gain.ctypes.data, out.shape[1], eps)


def _add_rms_norm(total: Any, out: Any, x: Any, more: Any, gain: Any, eps: Any) -> None:
    """float32 total, out, x and more [n, size]; gain [size]."""
    for row in numba.prange(x.shape[0]):
        here = total[row].ctypes.data
        add_rows(here, x[row].ctypes.data, more[row].ctypes.data, x.shape[1])
        rms_norm(out[row].ctypes.data, here, gain.ctypes.data, x.shape[1], eps)


@inner
def qk_norm_rotary_row(
    out: Any, x: Any, apart: Any, cosine: Any, sine: Any, gains: Any, queries: Any, eps: Any
) -> None:
    """float32 out [heads, dim]; x is the address of such heads, `apart` bytes from one to the next; cosine and sine
    [rotary_dim], gains [2, dim]."""
    size, rotary = out.shape[1], cosine.shape[0]
    half = rotary // 2
    tables = (
        *(cosine.ctypes.data, sine.ctypes.data),
        *(cosine.ctypes.data + half * FLOAT, sine.ctypes.data + half * FLOAT),
    )
    for head in range(out.shape[0]):
        to, place, gain = out[head].ctypes.data, x + head * apart, gains[0 if head < queries else 1].ctypes.data
        scale = scale_of(place, size, eps) if eps >= 0 else np.float32(1.0)
        rotate_scaled(to, place, gain, tables, half, scale)
        behind = rotary * FLOAT
        scaled(to + behind, place + behind, gain + behind, size - rotary, scale)


def _qk_norm_rotary(
    out: Any, x: Any, apart: Any, heads_apart: Any, cosine: Any, sine: Any, gains: Any, queries: Any, eps: Any
) -> None:
    """float32 out [n, heads, dim]; x is the address of rows of as many heads or more, with the bytes from row to row
    and from head to head; cosine and sine [n, 1, rotary_dim], gains [2, dim]. No norm if eps is below 0."""
    for row in numba.prange(out.shape[0]):
        here = x + np.intp(row) * apart
        qk_norm_rotary_row(out[row], here, heads_apart, cosine[row, 0], sine[row, 0], gains, queries, eps)


@inner
def _silu_and_mul_row(out: Any, x: Any) -> None:
    """float32 out [inner], x [2 · inner]."""
    inner = out.shape[0]
    whole = inner // LANES
    gate(out.ctypes.data, x.ctypes.data, x.ctypes.data + inner * FLOAT, whole)
    for place in range(whole * LANES, inner):
        out[place] = x[place] / (np.float32(1.0) + np.exp(-x[place])) * x[inner + place]


def _silu_and_mul(out: Any, x: Any) -> None:
    """float32 out [n, inner], x [n, 2 · inner], both in order."""
    for row in numba.prange(out.shape[0]):
        _silu_and_mul_row(out[row], x[row])


@inner
def _gelu_and_mul_row(out: Any, x: Any) -> None:
    """float32 out [inner], x [2 · inner]."""
    inner = out.shape[0]
    whole = inner // LANES
    gelu_gate(out.ctypes.data, x.ctypes.data, x.ctypes.data + inner * FLOAT, whole)
    for place in range(whole * LANES, inner):
        steep = np.float32(GELU_SLOPE) * (x[place] + np.float32(GELU_BEND) * x[place] * x[place] * x[place])
        out[place] = x[place] / (np.float32(1.0) + np.exp(-steep)) * x[inner + place]


def _gelu_and_mul(out: Any, x: Any) -> None:
    """float32 out [n, inner], x [n, 2 · inner], both in order."""
    for row in numba.prange(x.shape[0]):
        _gelu_and_mul_row(out[row], x[row])


_few, _many = partial(compiled, parallel=False, made_of=[vectors]), partial(compiled, made_of=[vectors])
_rms_norm_few, _rms_norm_many = _few(_rms_norm), _many(_rms_norm)
_add_rms_norm_many = _many(_add_rms_norm)
_qk_norm_rotary_few, _qk_norm_rotary_many = _few(_qk_norm_rotary), _many(_qk_norm_rotary)
_silu_and_mul_few, _silu_and_mul_many = _few(_silu_and_mul), _many(_silu_and_mul)
_gelu_and_mul_few, _gelu_and_mul_many = _few(_gelu_and_mul), _many(_gelu_and_mul)

_number, _rows, _heads = numba.float32, numba.float32[:, ::1], numba.float32[:, :, ::1]
_gain, _bytes = numba.float32[::1], numba.intp
_RMS_NORM = _rows, _bytes, _bytes, _gain, _number
_QK_NORM_ROTARY = _heads, _bytes, _bytes, _bytes, _heads, _heads, _rows, numba.intp, _number
TYPED = {
    "rms_norm_few": Typed(_rms_norm_few, _RMS_NORM),
    "rms_norm_many": Typed(_rms_norm_many, _RMS_NORM),
    "add_rms_norm_many": Typed(_add_rms_norm_many, (*[_rows] * 4, _gain, _number)),
    "qk_norm_rotary_few": Typed(_qk_norm_rotary_few, _QK_NORM_ROTARY),
    "qk_norm_rotary_many": Typed(_qk_norm_rotary_many, _QK_NORM_ROTARY),
    "silu_and_mul_few": Typed(_silu_and_mul_few, (_rows, _rows)),
    "silu_and_mul_many": Typed(_silu_and_mul_many, (_rows, _rows)),
    "gelu_and_mul_few": Typed(_gelu_and_mul_few, (_rows, _rows)),
    "gelu_and_mul_many": Typed(_gelu_and_mul_many, (_rows, _rows)),
}
"""Gates are for processors that multiply and add in one go."""


def rms_norm_rows(x: Array, gain: Array, eps: float) -> Array:
    """See `RowOps.rms_norm`."""
    out = np.empty(x.shape, np.float32)
    x = _with_rows(x)
    (_rms_norm_few if len(x) <= FEW else _rms_norm_many)(out, x.ctypes.data, x.strides[0], gain, np.float32(eps))
    return out


def qk_norm_rotary_rows(
    x: Array, cosine: Array, sine: Array, queries: int, keys: int, gains: Array, eps: float
) -> Array:
    """See `RowOps.qk_norm_rotary`; gains [2, head_dim]; no norm if eps is below 0."""
    out = np.empty((x.shape[0], queries + keys, x.shape[2]), np.float32)
    kernel = _qk_norm_rotary_few if len(x) <= FEW else _qk_norm_rotary_many
    tables = np.ascontiguousarray(cosine), np.ascontiguousarray(sine)
    x = _with_rows(x)
    kernel(out, x.ctypes.data, *x.strides[:2], *tables, gains, queries, np.float32(eps))
    return out


def silu_and_mul_rows(x: Array) -> Array:
    """See `RowOps.silu_and_mul`; for processors that multiply and add in one go."""
    out = np.empty((x.shape[0], x.shape[1] // 2), np.float32)
    (_silu_and_mul_few if len(x) <= FEW else _silu_and_mul_many)(out, np.ascontiguousarray(x))
    return out


def gelu_and_mul_rows(x: Array) -> Array:
    """See `RowOps.gelu_and_mul`; for processors that multiply and add in one go."""
    out = np.empty((x.shape[0], x.shape[1] // 2), np.float32)
    (_gelu_and_mul_few if len(x) <= FEW else _gelu_and_mul_many)(out, np.ascontiguousarray(x))
    return out


def _with_rows(x: Array) -> Array:
    """x with contiguous rows, as kernels read it."""
    return x if x.strides[-1] == FLOAT else np.ascontiguousarray(x)


class NumbaOps(TorchOps):
    """These kernels, while they are selected; else torch's operators. Of gates that of one activation is compiled, if
    it has any."""

    def __init__(self, activation: Activation = Activation.SILU) -> None:
        unused = {"silu", "gelu"} - ({_GATES.get(activation)} if fused_vectors() else set())
        names = (name for name in TYPED if name.partition("_")[0] not in unused)
        self.kernels = frozenset(f"{__name__}:{name}" for name in names)
        """See `NumbaCompiled`."""

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See `RowOps`."""
        if not selection.is_numba():
            return super().rms_norm(x, gain, eps)
        return torch.from_numpy(rms_norm_rows(x.numpy(), gain.numpy(), eps))

    def add_rms_norm(self, x: Tensor, more: Tensor, gain: Tensor, eps: float) -> Pair:
        """See `RowOps`; of few rows torch's sum takes as long."""
        if not selection.is_numba() or len(x) <= FEW:
            return super().add_rms_norm(x, more, gain, eps)
        total, out = (np.empty(x.shape, np.float32) for _ in range(2))
        given = (each.contiguous().numpy() for each in (x, more))
        _add_rms_norm_many(total, out, *given, gain.numpy(), np.float32(eps))
        return torch.from_numpy(total), torch.from_numpy(out)

    def qk_norm_rotary(
        self, x: Tensor, rotary: tuple[Tensor, ...], queries: int, keys: int, gains: Pair | None, eps: float
    ) -> Tensor:
        """See `RowOps`."""
        if not selection.is_numba():
            return super().qk_norm_rotary(x, rotary, queries, keys, gains, eps)
        cosine, sine = (table.numpy() for table in rotary)
        both, given_eps = both_gains(gains, eps, x.shape[2])
        return torch.from_numpy(qk_norm_rotary_rows(x.numpy(), cosine, sine, queries, keys, both, given_eps))

    def silu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """See `RowOps`."""
        if not (fused_vectors() and selection.is_numba()):
            return super().silu_and_mul(x, ends)
        return torch.from_numpy(silu_and_mul_rows(x.numpy()))

    def gelu_and_mul(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """See `RowOps`."""
        if not (fused_vectors() and selection.is_numba()):
            return super().gelu_and_mul(x, ends)
        return torch.from_numpy(gelu_and_mul_rows(x.numpy()))


_GATES = {Activation.SILU: "silu", Activation.GELU: "gelu"}


def both_gains(gains: Pair | None, eps: float, head_dim: int) -> tuple[Array, float]:
    """The last two arguments of `qk_norm_rotary_rows`."""
    return (np.ones((2, head_dim), np.float32), -1.0) if gains is None else (torch.stack(gains).numpy(), eps)
