"""Qwen2-VL and Qwen2.5-VL: pixel bounds hold for each frame, and frames are taken at equal steps from the first."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from common.media.item import Options
from encoder_service.families.family import Family
from encoder_service.families.qwen_processors import PixelDefaults, QwenProcessors, VideoProcessor, VideoRule
from encoder_service.families.resizing import resize_picture
from encoder_service.item import Inspection

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _sample(seen: Inspection, video: VideoProcessor, fps: float, max_frames: int) -> list[int]:
    """Whole frame groups: 20 frames at 8 per second, sampled at 2, are 0 5 10 15."""
    total, temporal = seen.frames, video.pixels.temporal
    max_frames = math.floor(min(max_frames, total) / temporal) * temporal
    kept = min(max(total / seen.fps * fps, video.min_frames), max_frames, total)
    count = max(math.floor(kept / temporal) * temporal, 1)
    step = total / count
    # The reference computes steps in float32, and rounding may add a frame. One that is beyond the video, or one too
    # many, is left out: the reference fails there, or exceeds its own bound. Beyond some 8000 frames it may differ by
    # one elsewhere too, since torch accumulates in float32 within each vector register.
    steps = (np.arange(math.ceil(total / step)) * step).astype(np.float32)
    return [int(frame) for frame in steps if frame < total][: max(max_frames, count)]


def _resize(frames: int, height: int, width: int, video: VideoProcessor, options: Options) -> tuple[int, int]:
    """Each frame as a picture, under its part of the bounds on all of them."""
    pixels = video.pixels
    each = Options(_share(options.min_pixels, frames), _share(options.max_pixels, frames))
    min_pixels, max_pixels = pixels.bounds(each)
    if video.cap_pixels_per_frame:
        budget = int(video.max_video_tokens * pixels.factor**2 * 0.9)
        max_pixels = max(min(max_pixels, budget * pixels.temporal // frames), int(min_pixels * 1.05))
        max_pixels = min(max_pixels, each.max_pixels or max_pixels)
    return resize_picture(height, width, pixels.factor, min_pixels, max_pixels)


def _share(bound: int | None, frames: int) -> int | None:
    """One frame's part of a bound on all of them."""
    return None if bound is None else max(bound // frames, 1)


VIDEO_RULE = VideoRule(_sample, _resize)
PICTURES = PixelDefaults(56 * 56, 28 * 28 * 1280, CLIP_MEAN, CLIP_STD)
_VIDEOS = PixelDefaults(128 * 28 * 28, 768 * 28 * 28, CLIP_MEAN, CLIP_STD)
_PROCESSORS = QwenProcessors(PICTURES, _VIDEOS, VIDEO_RULE, max_video_tokens=128_000)

QWEN2_VL = Family(
    tower="encoder_service.models.qwen2_vl:Qwen2VLTower",
    row_shape=lambda vision: (1, int(vision["hidden_size"])),
    processors=_PROCESSORS.read,
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    tower="encoder_service.models.qwen2_5_vl:Qwen25VLTower",
    row_shape=lambda vision: (1, int(vision["out_hidden_size"])),
)
