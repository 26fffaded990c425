"""Resizes 8-bit pictures on any device, bit for bit as torch's 8-bit kernel, which the reference's processors use and
which runs on CPUs only: antialiased bicubic in fixed point, along the width, rounded, then along the height. Floating
point differs by up to 20 grey levels. An output pixel depends on a few input pixels (`Taps`), with integer weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_service.worker.pixel_ring import kept_there

_A = -0.5
"""The parameter of the bicubic kernel with antialiasing."""
_SUPPORT = 2.0
"""Input pixels that it reaches to either side, at full size."""
_MAX_PRECISION = 22
_WEIGHT_LIMIT = 1 << 15
"""Weights are 16-bit numbers in torch's kernel."""
_CHUNK = 1 << 25
"""Elements of four bytes."""
_KEPT = 256
"""Lines whose taps a device keeps: those from 4000 to 1400 pixels take 140 KB."""


@dataclass(frozen=True, slots=True)
class Taps:
    """For each of `out` pixels of a line, the input pixels that it is made of: `index` [T, out] and `weight` [T, out],
    both int32; the weights of a pixel add up to about 2^precision."""

    index: Tensor
    weight: Tensor
    precision: int


def resize(frames: Tensor, size: tuple[int, int], *, chunk: int = _CHUNK) -> Tensor:
    """Resizes [T, 3, H, W] uint8 to `size` (height, width), antialiased bicubic; the result is uint8. At most `chunk`
    elements of an intermediate exist at a time, or those of one frame."""
    height, width = size
    return _along(_along(frames, -1, width, chunk), -2, height, chunk)


def _along(frames: Tensor, dim: int, out: int, chunk: int) -> Tensor:
    """One pass, along rows (-1) or columns (-2); some frames at a time, for the sake of memory."""
    if frames.shape[dim] == out:
        return frames
    taps = line_on(frames.shape[dim], out, frames.device)
    each = frames[0].numel() // frames.shape[dim] * out
    return torch.cat([_mix(part, dim, taps) for part in frames.split(max(1, chunk // each))])


def _mix(frames: Tensor, dim: int, taps: Taps) -> Tensor:
    total: Tensor | None = None
    for index, weight in zip(taps.index, taps.weight, strict=True):
        part = frames.index_select(dim, index).to(torch.int32)
        part *= weight if dim == -1 else weight[:, None]
        total = part if total is None else total.add_(part)
    assert total is not None
    total += 1 << (taps.precision - 1)
    return (total >> taps.precision).clamp_(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=_KEPT)
def line_on(size: int, out: int, device: torch.device) -> Taps:
    """As `line`, on a device, where the most used lines are cached."""
    taps = line(size, out)
    return Taps(kept_there(taps.index, device), kept_there(taps.weight, device), taps.precision)


@functools.lru_cache(maxsize=512)
def line(size: int, out: int) -> Taps:
    """The taps of a line of `size` pixels that is resized to `out`.

    When it shrinks, the kernel is widened in proportion. Centres are in the middle of pixels; pixels beyond the ends
    are ignored, and the other weights are normalised to sum to one.
    """
    scale = size / out
    stretch = max(scale, 1.0)
    centre = scale * (torch.arange(out, dtype=torch.float64) + 0.5)
    first = (centre - _SUPPORT * stretch + 0.5).long().clamp(min=0)
    last = (centre + _SUPPORT * stretch + 0.5).long().clamp(max=size)
    index = first + torch.arange(int((last - first).max()))[:, None]
    weight = _bicubic((index - centre + 0.5) / stretch).masked_fill(index >= last, 0.0)
    weight = weight / weight.sum(0)
    precision = _precision(float(weight.max()))
    scaled = weight * (1 << precision)
    fixed = torch.where(scaled < 0, scaled - 0.5, scaled + 0.5).to(torch.int32)
    return Taps(index.clamp(max=size - 1).to(torch.int32), fixed, precision)


def _bicubic(x: Tensor) -> Tensor:
    x = x.abs()
    near = ((_A + 2) * x - (_A + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * _A
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _precision(largest: float) -> int:
    """The most fractional bits with which the largest weight still fits."""
    for bits in range(_MAX_PRECISION):
        if int(0.5 + largest * (1 << (bits + 1))) >= _WEIGHT_LIMIT:
            return bits
    return _MAX_PRECISION
