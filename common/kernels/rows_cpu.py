"""What a decoder does to its rows between two products, on a CPU in float32, compiled by numba, one kernel each.

torch needs five operators for a norm and ten for what is turned: to start them takes longer than the arithmetic of a
few rows. One thread computes: a chunk takes microseconds, and to wake others takes as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.jit import compiled

Array = np.ndarray[Any, Any]


def _norm(out: Any, x: Any, gain: Any, eps: Any) -> None:
    """float32 out [n, size], x alike, of any strides; gain [size]."""
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = np.float32(0.0)
        for place in range(size):
            total += x[row, place] * x[row, place]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for place in range(size):
            out[row, place] = x[row, place] * factor * gain[place]


def _turn(out: Any, x: Any, cosine: Any, sine: Any, gains: Any, queries: Any, eps: Any) -> None:
    """float32 out [n, heads, dim], x [n, heads or more, dim], cosine and sine [n, 1, dim], gains [2, dim]. Where eps is
    below 0, without a norm."""
    size = out.shape[2]
    half = size // 2
    for row in range(out.shape[0]):
        cos, sin = cosine[row, 0], sine[row, 0]
        for head in range(out.shape[1]):
            factor = np.float32(1.0)
            if eps >= 0:
                total = np.float32(0.0)
                for place in range(size):
                    total += x[row, head, place] * x[row, head, place]
                factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
            kind = 0 if head < queries else 1
            for place in range(half):
                first = x[row, head, place] * factor * gains[kind, place]
                second = x[row, head, half + place] * factor * gains[kind, half + place]
                out[row, head, place] = first * cos[place] - second * sin[place]
                out[row, head, half + place] = second * cos[half + place] + first * sin[half + place]


_norm_kernel, _turn_kernel = compiled(_norm, parallel=False), compiled(_turn, parallel=False)


def normed_rows(x: Array, gain: Array, eps: float) -> Array:
    """`rms_norm` of arrays."""
    out = np.empty(x.shape, np.float32)
    _norm_kernel(out, x, gain, np.float32(eps))
    return out


def turned_heads(x: Array, cosine: Array, sine: Array, queries: int, keys: int, gains: Array, eps: float) -> Array:
    """`turned` of arrays; gains [2, head_dim], eps below 0 where nothing is normed."""
    out = np.empty((x.shape[0], queries + keys, x.shape[2]), np.float32)
    _turn_kernel(out, x, cosine, sine, gains, queries, np.float32(eps))
    return out


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x float32 [n, size], whose rows may be apart, over the root of each row's mean square, times gain [size]."""
    return torch.from_numpy(normed_rows(x.numpy(), gain.numpy(), eps))


def turned(
    x: Tensor, cosine: Tensor, sine: Tensor, queries: int, keys: int, gains: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """The first heads of x float32 [n, queries + keys or more, head_dim], by the angles of each token: [n, queries +
    keys, head_dim].

    cosine and sine are [n, 1, head_dim]. With `gains`, [head_dim] for queries and for keys, each head is first normed.
    """
    both, least = both_gains(gains, eps, x.shape[2])
    return torch.from_numpy(turned_heads(x.numpy(), cosine.numpy(), sine.numpy(), queries, keys, both, least))


def both_gains(gains: tuple[Tensor, Tensor] | None, eps: float, head_dim: int) -> tuple[Array, float]:
    """The last two arguments of `turned_heads`."""
    return (np.ones((2, head_dim), np.float32), -1.0) if gains is None else (torch.stack(gains).numpy(), eps)


def gated(x: Tensor) -> Tensor:
    """x [n, 2 · inner] → silu(first half) · second half, [n, inner]; by torch, which has a vector of exponentials."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
