"""Qwen3-VL: pixel bounds hold for all frames together, and frames are spread from the first to the last."""

from __future__ import annotations

import numpy as np

from common.media.item import Options
from encoder_service.families.family import Family, PixelDefaults, VideoRule, VideoSettings, bounds, resize_clip
from encoder_service.families.qwen2_vl import PICTURES
from encoder_service.item import Inspection


def _sample(seen: Inspection, settings: VideoSettings, fps: float, max_frames: int) -> list[int]:
    """From the first to the last: 20 frames at 8 per second, sampled at 2, are 0 5 10 14 19."""
    total = seen.frames
    count = min(max(int(total / seen.fps * fps), settings.min_frames), max_frames, total)
    return [int(frame) for frame in np.linspace(0, total - 1, count).round()]


def _resize(frames: int, height: int, width: int, settings: VideoSettings, options: Options) -> tuple[int, int]:
    """All frames as one volume."""
    pixels = settings.pixels
    min_pixels, max_pixels = bounds(pixels, options)
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * pixels.factor**2, max_pixels // frames)
        max_pixels = max(share, int(min_pixels * 1.05)) * frames
        max_pixels = min(max_pixels, options.max_pixels or max_pixels)
    return resize_clip(frames, height, width, pixels.temporal, pixels.factor, min_pixels, max_pixels)


QWEN3_VL = Family(
    tower="encoder_service.models.qwen3_vl:Qwen3VLTower",
    rule=VideoRule(_sample, _resize),
    image=PICTURES,
    video=PixelDefaults(128 * 32 * 32, 768 * 32 * 32, (0.5,) * 3, (0.5,) * 3),
    max_video_tokens=768,
    row_width=lambda vision: int(vision["out_hidden_size"]),
)
