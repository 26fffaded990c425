"""Sizes after resizing, by the formulas of the reference's processors (`smart_resize` of Qwen2-VL and Qwen3-VL)."""

from __future__ import annotations

import math

from common.media.item import Options


def bounds(min_pixels: int, max_pixels: int, options: Options) -> tuple[int, int]:
    """The bounds of the area after resizing: the caller's if given, else the model's, which gives way. A caller may
    also give an upper bound that only applies if it is the lower one."""
    most = options.max_pixels or max_pixels
    max_pixels = min(most, max_pixels) if options.clamp_max_pixels else most
    min_pixels = options.min_pixels or min_pixels
    if min_pixels > max_pixels:
        return (max_pixels, max_pixels) if options.max_pixels else (min_pixels, min_pixels)
    return min_pixels, max_pixels


def resize_picture(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Sides rounded to multiples of `factor`, the area brought into [min_pixels, max_pixels] with the ratio kept."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        return _floor(height / shrink, factor), _floor(width / shrink, factor)
    if tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return _ceil(height * grow, factor), _ceil(width * grow, factor)
    return tall, wide


def resize_clip(
    frames: int, height: int, width: int, temporal: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """As `resize_picture`, with the bounds on all frames together, and sides of at least `factor` to begin with."""
    frames = max(frames, temporal)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    volume = round(frames / temporal) * temporal * tall * wide
    if volume > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        return _floor(height / shrink, factor), _floor(width / shrink, factor)
    if volume < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        return _ceil(height * grow, factor), _ceil(width * grow, factor)
    return tall, wide


def _floor(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)


def _ceil(side: float, factor: int) -> int:
    return math.ceil(side / factor) * factor
