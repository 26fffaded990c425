"""The nouns of a vision family, and of a checkpoint of one: what there is to know before its tower is loaded. And sizes
after resizing, by the formulas of the reference's processors (`smart_resize` of Qwen2-VL and Qwen3-VL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.media.item import Options
from encoder_service.item import Inspection


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """How decoded pixels become patches. Bounds are areas in pixels; mean and std are of values in [0, 1]."""

    min_pixels: int
    max_pixels: int
    patch: int
    temporal: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float

    @property
    def factor(self) -> int:
        """Sides are multiples of this: a patch times a merge."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class VideoRule:
    """How a family samples and sizes a video.

    `sample(seen, settings, fps, max_frames)` gives the numbers of the frames to keep: about `fps` each second, spread
    evenly, between the model's bounds. `resize(frames, height, width, settings, options)` gives the resized (height,
    width) of each frame; a caller's bounds always hold for all frames together.
    """

    sample: Callable[[Inspection, VideoSettings, float, int], list[int]]
    resize: Callable[[int, int, int, VideoSettings, Options], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """How a video is sampled and sized, beyond `pixels`."""

    pixels: PixelSettings
    rule: VideoRule
    fps: float
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int


@dataclass(frozen=True, slots=True)
class PixelDefaults:
    """What the reference takes where a processor's settings leave it out."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Towers of one make, and the defaults of their processors.

    `tower` is the class ("module:Class") that is built from `vision_config`, imported by device workers alone.
    `row_width` reads the width of a row there.
    """

    tower: str
    rule: VideoRule
    image: PixelDefaults
    video: PixelDefaults
    max_video_tokens: int
    row_width: Callable[[Mapping[str, Any]], int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The tower's own numbers (`vision`, as in config.json) and the processors' settings."""

    architecture: str
    family: Family
    vision: Mapping[str, Any]
    image: PixelSettings
    video: VideoSettings
    width: int
    levels: int


def bounds(settings: PixelSettings, options: Options) -> tuple[int, int]:
    """The area's bounds after resizing: the caller's where given, else the model's, which then gives way."""
    min_pixels, max_pixels = options.min_pixels or settings.min_pixels, options.max_pixels or settings.max_pixels
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
