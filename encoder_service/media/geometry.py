"""Sizes, frames and grids: what an item will be, computed from its header alone.

The formulas are those of the reference's processors (`smart_resize` and `sample_frames` of Qwen2-VL and Qwen3-VL), step
for step, since one patch more or less changes every position after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from common.media.item import Grid, Options, Pixels
from encoder_service.item import Inspection, Plan
from encoder_service.models.config import PixelSettings, VideoRule, VideoSettings


def plan_image(seen: Inspection, settings: PixelSettings, options: Options) -> Plan:
    """The plan of a picture. A 640 × 480 one with factor 28 and wide bounds becomes 644 × 476: grid (1, 34, 46)."""
    least, most = bounds(settings, options)
    height, width = resize_picture(seen.height, seen.width, settings.factor, least, most)
    grid = Grid(1, height // settings.patch, width // settings.patch)
    return Plan(grid, _tokens(grid, settings), (0,), seen.height, seen.width, (height, width))


def plan_video(seen: Inspection, settings: VideoSettings, options: Options) -> Plan:
    """The plan of a video: which frames, how large, and when each frame group is."""
    pixels = settings.pixels
    most_frames = min(settings.max_frames, options.max_frames or settings.max_frames)
    frames = sample(seen, settings, options.fps or settings.fps, most_frames)
    height, width = _video_size(len(frames), seen.height, seen.width, settings, options)
    padded = (*frames, *([frames[-1]] * (-len(frames) % pixels.temporal)))
    grid = Grid(len(padded) // pixels.temporal, height // pixels.patch, width // pixels.patch)
    sampled_fps = len(frames) / seen.frames * seen.fps
    return Plan(
        grid=grid,
        tokens=_tokens(grid, pixels),
        frames=padded,
        height=seen.height,
        width=seen.width,
        resized=(height, width),
        timestamps=_group_means([frame / seen.fps for frame in padded], pixels.temporal),
        seconds_per_grid=pixels.temporal / sampled_fps,
    )


def plan_frames(given: Pixels, settings: VideoSettings, options: Options) -> Plan:
    """The plan of a video's decoded frames: every one is kept. Those without times are `fps` apart."""
    temporal = settings.pixels.temporal
    height, width = _video_size(given.frames, given.height, given.width, settings, options)
    fps = options.fps or settings.fps
    times = list(given.timestamps) or [frame / fps for frame in range(given.frames)]
    apart = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1 / fps
    frames = (*range(given.frames), *([given.frames - 1] * (-given.frames % temporal)))
    grid = Grid(len(frames) // temporal, height // settings.pixels.patch, width // settings.pixels.patch)
    return Plan(
        grid=grid,
        tokens=_tokens(grid, settings.pixels),
        frames=frames,
        height=given.height,
        width=given.width,
        resized=(height, width),
        timestamps=_group_means([times[frame] for frame in frames], temporal),
        seconds_per_grid=temporal * apart,
    )


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


def sample(seen: Inspection, settings: VideoSettings, fps: float, most_frames: int) -> list[int]:
    """The numbers of the frames to keep: about `fps` each second, spread evenly, between the model's bounds.

    Qwen2-VL steps from the first frame on and keeps whole frame groups: 20 frames at 8 per second, sampled at 2, are 0
    5 10 15. Qwen3-VL spreads them from the first to the last: 0 5 10 14 19.
    """
    total, temporal = seen.frames, settings.pixels.temporal
    wanted = total / seen.fps * fps
    if settings.rule is VideoRule.WHOLE:
        count = min(max(int(wanted), settings.min_frames), most_frames, total)
        return [int(frame) for frame in np.linspace(0, total - 1, count).round()]
    most_frames = math.floor(min(most_frames, total) / temporal) * temporal
    kept = min(max(wanted, settings.min_frames), most_frames, total)
    count = max(math.floor(kept / temporal) * temporal, 1)
    step = total / count
    # The reference counts steps in float32, and rounding may give it one frame more. Where that is none of the video's,
    # or one too many, it is left out: the reference fails there, or passes its own bound. Past some 8000 frames it may
    # be one off elsewhere too, since torch counts on in float32 within each vector of the machine's.
    steps = (np.arange(math.ceil(total / step)) * step).astype(np.float32)
    return [int(frame) for frame in steps if frame < total][: max(most_frames, count)]


def _group_means(seconds: Sequence[float], temporal: int) -> tuple[float, ...]:
    """Seconds of each frame group: the mean of its first and last frame's."""
    return tuple((seconds[at] + seconds[at + temporal - 1]) / 2 for at in range(0, len(seconds), temporal))


def _video_size(frames: int, height: int, width: int, settings: VideoSettings, options: Options) -> tuple[int, int]:
    """The resized (height, width) of each frame. A caller's bounds always hold for all frames together."""
    pixels = settings.pixels
    area, cap = pixels.factor * pixels.factor, settings.cap_pixels_per_frame
    if settings.rule is VideoRule.WHOLE:
        least, most = bounds(pixels, options)
        if cap:
            share = min(settings.max_video_tokens * area, most // frames)
            most = max(share, int(least * 1.05)) * frames
            most = min(most, options.max_pixels or most)
        return resize_clip(frames, height, width, pixels.temporal, pixels.factor, least, most)
    each = Options(_share(options.min_pixels, frames), _share(options.max_pixels, frames))
    least, most = bounds(pixels, each)
    if cap:
        budget = int(settings.max_video_tokens * area * 0.9)
        most = max(min(most, budget * pixels.temporal // frames), int(least * 1.05))
        most = min(most, each.max_pixels or most)
    return resize_picture(height, width, pixels.factor, least, most)


def _share(bound: int | None, frames: int) -> int | None:
    """One frame's part of a bound on all of them."""
    return None if bound is None else max(bound // frames, 1)


def _tokens(grid: Grid, settings: PixelSettings) -> int:
    return grid.patches // settings.merge**2


def _floor(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)


def _ceil(side: float, factor: int) -> int:
    return math.ceil(side / factor) * factor
