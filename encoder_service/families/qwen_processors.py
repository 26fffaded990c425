"""The processors of the Qwen families: pictures and frames resized, normalised, and cut into squares of patches.

Plans are computed step for step as the reference's processors do, since one patch more or less changes every position
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.media.item import Grid, Modality, Options, Pixels
from encoder_service.families.family import Processor
from encoder_service.families.pixel_settings import PixelSettings, check_steps
from encoder_service.families.resizing import resize_picture
from encoder_service.item import Inspection, Plan

_PREPROCESS: Final = "encoder_service.worker.patches:preprocess"


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Pictures: resized within bounds, at the ratio that they have."""

    pixels: PixelSettings
    preprocess: str = _PREPROCESS

    @property
    def merge(self) -> int:
        return self.pixels.merge

    def rows(self, grid: Grid) -> int:
        """As `Processor.rows` has it."""
        return self.pixels.rows(grid)

    def plan(self, seen: Inspection, options: Options) -> Plan:
        """A 640 × 480 picture with factor 28 and wide bounds becomes 644 × 476: grid (1, 34, 46)."""
        pixels = self.pixels
        resized = resize_picture(seen.height, seen.width, pixels.factor, *pixels.bounds(options))
        grid = pixels.grid(1, resized)
        return Plan(grid, pixels.rows(grid), (0,), seen.height, seen.width, resized)

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:
        """As for a file with these dimensions."""
        return self.plan(Inspection(given.width, given.height), options)


@dataclass(frozen=True, slots=True)
class VideoRule:
    """How a family samples and sizes a video.

    `sample(seen, processor, fps, max_frames)` gives the numbers of the frames to keep: about `fps` each second, spread
    evenly, between the model's bounds. `resize(frames, height, width, processor, options)` gives the resized (height,
    width) of each frame; a caller's bounds always hold for all frames together.
    """

    sample: Callable[[Inspection, VideoProcessor, float, int], list[int]]
    resize: Callable[[int, int, int, VideoProcessor, Options], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """Videos: frames sampled and resized by a rule, and `pixels.temporal` of them a frame group."""

    pixels: PixelSettings
    rule: VideoRule
    fps: float
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int
    preprocess: str = _PREPROCESS

    @property
    def merge(self) -> int:
        return self.pixels.merge

    def rows(self, grid: Grid) -> int:
        """As `Processor.rows` has it."""
        return self.pixels.rows(grid)

    def plan(self, seen: Inspection, options: Options) -> Plan:
        """Which frames are taken, their size, and the time of each frame group."""
        max_frames = min(self.max_frames, options.max_frames or self.max_frames)
        frames = self.rule.sample(seen, self, options.fps or self.fps, max_frames)
        resized = self.rule.resize(len(frames), seen.height, seen.width, self, options)
        sampled_fps = len(frames) / seen.frames * seen.fps
        times = [frame / seen.fps for frame in frames]
        return self._plan(frames, times, (seen.height, seen.width), resized, 1 / sampled_fps)

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:
        """All frames are kept. Frames without times are spaced by `fps`."""
        resized = self.rule.resize(given.frames, given.height, given.width, self, options)
        fps = options.fps or self.fps
        times = list(given.timestamps) or [frame / fps for frame in range(given.frames)]
        apart = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1 / fps
        return self._plan(range(given.frames), times, (given.height, given.width), resized, apart)

    def _plan(
        self,
        frames: Sequence[int],
        times: Sequence[float],
        size: tuple[int, int],
        resized: tuple[int, int],
        apart: float,
    ) -> Plan:
        """The last frame is repeated until the last frame group is full. A group's time is the mean of its first and
        last frame's. `apart` is the time between frames in seconds."""
        temporal = self.pixels.temporal
        missing = -len(frames) % temporal
        seconds = [*times, *[times[-1]] * missing]
        grid = self.pixels.grid(len(seconds) // temporal, resized)
        return Plan(
            grid=grid,
            tokens=self.pixels.rows(grid),
            frames=(*frames, *[frames[-1]] * missing),
            height=size[0],
            width=size[1],
            resized=resized,
            timestamps=tuple((seconds[at] + seconds[at + temporal - 1]) / 2 for at in range(0, len(seconds), temporal)),
            seconds_per_grid=temporal * apart,
        )


@dataclass(frozen=True, slots=True)
class PixelDefaults:
    """The reference's defaults for settings that a processor lacks."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class QwenProcessors:
    """A family's defaults; in `read`, settings of the checkpoint take precedence."""

    image: PixelDefaults
    video: PixelDefaults
    rule: VideoRule
    max_video_tokens: int

    def read(self, checkpoint: Checkpoint, tower: Mapping[str, Any]) -> Mapping[Modality, Processor]:
        """Reads both layouts: the published one (`preprocessor_config.json`, `video_preprocessor_config.json`, bounds
        as `min_pixels` and `max_pixels`) and the one that `transformers` 5 saves (`processor_config.json`, bounds as
        `size`). Raises CheckpointError for unsupported settings, KeyError for missing ones."""
        saved = checkpoint.json("processor_config.json")
        image = saved.get("image_processor") or checkpoint.json("preprocessor_config.json")
        video = saved.get("video_processor") or checkpoint.json("video_preprocessor_config.json") or image
        if not image:
            raise CheckpointError("the checkpoint has no preprocessor_config.json")
        return {
            Modality.IMAGE: ImageProcessor(_pixels(image, tower, self.image)),
            Modality.VIDEO: VideoProcessor(
                pixels=_pixels(video, tower, self.video),
                rule=self.rule,
                fps=float(video.get("fps") or 2.0),
                min_frames=int(video.get("min_frames") or 4),
                max_frames=int(video.get("max_frames") or 768),
                cap_pixels_per_frame=bool(video.get("cap_pixels_per_frame")),
                max_video_tokens=int(video.get("max_video_tokens") or self.max_video_tokens),
            ),
        }


def _pixels(given: Mapping[str, Any], tower: Mapping[str, Any], default: PixelDefaults) -> PixelSettings:
    check_steps(given)
    size = given.get("size") or {}
    return PixelSettings(
        min_pixels=int(
            given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default.min_pixels
        ),
        max_pixels=int(
            given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default.max_pixels
        ),
        patch=_same("patch_size", given, tower, "patch_size"),
        temporal=_same("temporal_patch_size", given, tower, "temporal_patch_size"),
        merge=_same("merge_size", given, tower, "spatial_merge_size"),
        mean=tuple(given.get("image_mean") or default.mean),
        std=tuple(given.get("image_std") or default.std),
        rescale=float(given.get("rescale_factor") or 1 / 255),
    )


def _same(name: str, given: Mapping[str, Any], tower: Mapping[str, Any], tower_name: str) -> int:
    """A length that the tower is built for, and that its processor must not have otherwise."""
    length = tower[tower_name]
    if not isinstance(length, int) or given.get(name, length) != length:
        raise CheckpointError(f"the processor's {name} is {given.get(name)}, and {tower_name} of the tower is {length}")
    return length
