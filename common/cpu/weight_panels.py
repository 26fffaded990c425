"""Panels of weights, in the layout that kernels multiply: 64 outputs, whose weights for one input are adjacent."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from common.cpu.arrays import lined
from common.cpu.jit import Array, inner
from common.cpu.vectors.llvm import FLOAT, LANES, LINE
from common.cpu.vectors.pairs import copy
from common.cpu.vectors.products import write_sums

WIDTH = 64
"""Outputs of a panel, whose weights for one input are adjacent."""
VECTORS = WIDTH // LANES
_AT_ONCE = 64
"""Panels that are laid out, or multiplied by torch, at a time, so that this takes little memory beside them."""


_ONES, _ZEROS = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)


@inner
def write_panel(out: Any, panel: Any, begin: Any, rows: Any, room: Any, scale: Any, bias: Any) -> None:
    """Fills out [begin : begin + rows] of one panel's outputs: sums · scale + bias, scale and bias [outputs] or [0].
    The sums begin at the first line of `room`."""
    first, skipped = panel * WIDTH, first_line(room)
    if first + WIDTH > out.shape[1]:
        for row in range(rows):
            for place in range(out.shape[1] - first):
                total = room[skipped + row * WIDTH + place]
                if len(scale):
                    total *= scale[first + place]
                out[begin + row, first + place] = total + bias[first + place] if len(bias) else total
        return
    if not len(scale) and not len(bias):
        for row in range(rows):
            to = out.ctypes.data + ((begin + row) * out.shape[1] + first) * FLOAT
            copy(to, room.ctypes.data + (skipped + row * WIDTH) * FLOAT, VECTORS)
        return
    scales = scale.ctypes.data + first * FLOAT if len(scale) else _ONES.ctypes.data
    biases = bias.ctypes.data + first * FLOAT if len(bias) else _ZEROS.ctypes.data
    for row in range(rows):
        to = out.ctypes.data + ((begin + row) * out.shape[1] + first) * FLOAT
        write_sums(VECTORS, (to, room.ctypes.data + (skipped + row * WIDTH) * FLOAT, scales, biases))


@numba.njit(inline="always")
def first_line(room: Any) -> Any:
    """Numbers of an array of float32 before its first line."""
    return (-room.ctypes.data % LINE) // FLOAT


def panels_of_pairs(weight: Tensor, multiple: int) -> Array:
    """A weight [outputs, inputs], rounded to bfloat16, in panels [⌈outputs / 64⌉, ⌈inputs / 2⌉, 32] uint64, padded with
    zeros: the 64 words of 32 bits of a pair have one output each, of the first input in the lower half. Pairs are
    padded to a multiple."""
    outputs, inputs = weight.shape
    count, pairs = -(-outputs // WIDTH), -(-inputs // (2 * multiple)) * multiple
    words = lined((count, pairs, WIDTH // 2), np.uint64)
    out = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(count, pairs, WIDTH, 2)
    for part, rows in zip(out.split(_AT_ONCE), weight.split(_AT_ONCE * WIDTH), strict=True):
        padded = rows.new_zeros(len(part) * WIDTH, 2 * pairs, dtype=torch.bfloat16)
        padded[: len(rows), :inputs] = rows
        part.copy_(padded.view(len(part), WIDTH, pairs, 2).transpose(1, 2))
    return words


def product_by_torch(x: Tensor, panels: Array, bias: Tensor | None, outputs: int) -> Tensor:
    """x [m, inputs], rounded to bfloat16, · panels of pairs + bias [outputs], in float32, [m, outputs]."""
    rows = x.bfloat16().float()
    out: Tensor = rows.new_empty(len(rows), len(panels), WIDTH)
    for first in range(0, len(panels), _AT_ONCE):
        pairs = torch.from_numpy(panels[first : first + _AT_ONCE].view(np.int16)).view(torch.bfloat16)
        weights = pairs.view(len(pairs), -1, WIDTH, 2).transpose(2, 3).flatten(1, 2)[:, : x.shape[1]].float()
        out[:, first : first + len(weights)] = (rows @ weights).transpose(0, 1)
    out = out.flatten(1)[:, :outputs]
    return (out if bias is None else out + bias).contiguous()
