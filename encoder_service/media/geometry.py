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
    max_frames = min(settings.max_frames, options.max_frames or settings.max_frames)
    frames = settings.rule.sample(seen, settings, options.fps or settings.fps, max_frames)
    resized = settings.rule.resize(len(frames), seen.height, seen.width, settings, options)
    sampled_fps = len(frames) / seen.frames * seen.fps
    times = [frame / seen.fps for frame in frames]
    return _plan(frames, times, (seen.height, seen.width), resized, settings.pixels.temporal / sampled_fps, settings)


def plan_frames(given: Pixels, settings: VideoSettings, options: Options) -> Plan:
    """The plan of a video's decoded frames: every one is kept. Those without times are `fps` apart."""
    resized = settings.rule.resize(given.frames, given.height, given.width, settings, options)
    fps = options.fps or settings.fps
    times = list(given.timestamps) or [frame / fps for frame in range(given.frames)]
    apart = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1 / fps
    size = (given.height, given.width)
    return _plan(range(given.frames), times, size, resized, settings.pixels.temporal * apart, settings)


def _plan(
    frames: Sequence[int],
    times: Sequence[float],
    size: tuple[int, int],
    resized: tuple[int, int],
    seconds_per_grid: float,
    settings: VideoSettings,
) -> Plan:
    """The last frame stands there again until the last frame group is whole. A group's time is the mean of its first
    and last frame's."""
    pixels, temporal = settings.pixels, settings.pixels.temporal
    missing = -len(frames) % temporal
    seconds = [*times, *[times[-1]] * missing]
    grid = Grid(len(seconds) // temporal, resized[0] // pixels.patch, resized[1] // pixels.patch)
    return Plan(
        grid=grid,
        tokens=_tokens(grid, pixels),
        frames=(*frames, *[frames[-1]] * missing),
        height=size[0],
        width=size[1],
        resized=resized,
        timestamps=tuple((seconds[at] + seconds[at + temporal - 1]) / 2 for at in range(0, len(seconds), temporal)),
        seconds_per_grid=seconds_per_grid,
    )


def _tokens(grid: Grid, settings: PixelSettings) -> int:
    return grid.patches // settings.merge**2
