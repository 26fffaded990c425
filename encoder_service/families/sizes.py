"""Sizes after resizing, by the formulas of the reference's processors (`smart_resize` of Qwen2-VL and Qwen3-VL)."""

from __future__ import annotations

import math

from common.media.item import Options
from encoder_service.families.family import PixelSettings


def bounds(settings: PixelSettings, options: Options) -> tuple[int, int]:
    """The least and greatest area after resizing: the caller's where given, else the model's, which then gives way."""
    least, most = options.min_pixels or settings.min_pixels, options.max_pixels or settings.max_pixels
    if least > most:
        return (most, most) if options.max_pixels else (least, least)
    return least, most


def resize_picture(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Sides rounded to multiples of `factor`, the area brought into [least, most] with the ratio kept."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        shrink = math.sqrt((height * width) / most)
        return _floor(height / shrink, factor), _floor(width / shrink, factor)
    if tall * wide < least:
        grow = math.sqrt(least / (height * width))
        return _ceil(height * grow, factor), _ceil(width * grow, factor)
    return tall, wide


def resize_clip(
    frames: int, height: int, width: int, temporal: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """As `resize_picture`, with the bounds on all frames together, and sides of at least `factor` to begin with."""
    frames = max(frames, temporal)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    volume = round(frames / temporal) * temporal * tall * wide
    if volume > most:
        shrink = math.sqrt((frames * height * width) / most)
        return _floor(height / shrink, factor), _floor(width / shrink, factor)
    if volume < least:
        grow = math.sqrt(least / (frames * height * width))
        return _ceil(height * grow, factor), _ceil(width * grow, factor)
    return tall, wide


def _floor(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)


def _ceil(side: float, factor: int) -> int:
    return math.ceil(side / factor) * factor
