"""Plans: what an item will be, computed from its header alone, step for step as the reference's processors do, since
one patch more or less changes every position after it."""

from __future__ import annotations

from collections.abc import Sequence

from common.media.item import Grid, Options, Pixels
from encoder_service.families.family import PixelSettings, VideoSettings, bounds, resize_picture
from encoder_service.item import Inspection, Plan


def plan_image(seen: Inspection, settings: PixelSettings, options: Options) -> Plan:
    """The plan of a picture. A 640 × 480 one with factor 28 and wide bounds becomes 644 × 476: grid (1, 34, 46)."""
    height, width = resize_picture(seen.height, seen.width, settings.factor, *bounds(settings, options))
    grid = Grid(1, height // settings.patch, width // settings.patch)
    return Plan(grid, _tokens(grid, settings), (0,), seen.height, seen.width, (height, width))


def plan_video(seen: Inspection, settings: VideoSettings, options: Options) -> Plan:
    """The plan of a video: which frames, how large, and when each frame group is."""
    pixels = settings.pixels
    max_frames = min(settings.max_frames, options.max_frames or settings.max_frames)
    frames = settings.rule.sample(seen, settings, options.fps or settings.fps, max_frames)
    height, width = settings.rule.resize(len(frames), seen.height, seen.width, settings, options)
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
    height, width = settings.rule.resize(given.frames, given.height, given.width, settings, options)
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


def _group_means(seconds: Sequence[float], temporal: int) -> tuple[float, ...]:
    """Seconds of each frame group: the mean of its first and last frame's."""
    return tuple((seconds[at] + seconds[at + temporal - 1]) / 2 for at in range(0, len(seconds), temporal))


def _tokens(grid: Grid, settings: PixelSettings) -> int:
    return grid.patches // settings.merge**2
