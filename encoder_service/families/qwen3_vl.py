"""Qwen3-VL: pixel bounds hold for all frames together, and frames are spread from the first to the last."""

from __future__ import annotations

import numpy as np

from common.media.item import Options
from encoder_service.families.family import Family
from encoder_service.families.qwen2_vl import PICTURES
from encoder_service.families.qwen_processors import PixelDefaults, QwenProcessors, VideoProcessor, VideoRule
from encoder_service.families.resizing import resize_clip
from encoder_service.item import Inspection


def _sample(seen: Inspection, video: VideoProcessor, fps: float, max_frames: int) -> list[int]:
    """From the first to the last: 20 frames at 8 per second, sampled at 2, are 0 5 10 14 19."""
    total = seen.frames
    count = min(max(int(total / seen.fps * fps), video.min_frames), max_frames, total)
    return [int(frame) for frame in np.linspace(0, total - 1, count).round()]


def _resize(frames: int, height: int, width: int, video: VideoProcessor, options: Options) -> tuple[int, int]:
    """All frames as one volume."""
    pixels = video.pixels
    min_pixels, max_pixels = pixels.bounds(options)
    if video.cap_pixels_per_frame:
        share = min(video.max_video_tokens * pixels.factor**2, max_pixels // frames)
        max_pixels = max(share, int(min_pixels * 1.05)) * frames
        max_pixels = min(max_pixels, options.max_pixels or max_pixels)
    return resize_clip(frames, height, width, pixels.temporal, pixels.factor, min_pixels, max_pixels)


VIDEO_RULE = VideoRule(_sample, _resize)
_VIDEOS = PixelDefaults(128 * 32 * 32, 768 * 32 * 32, (0.5,) * 3, (0.5,) * 3)
_PROCESSORS = QwenProcessors(PICTURES, _VIDEOS, VIDEO_RULE, max_video_tokens=768)

QWEN3_VL = Family(
    tower="encoder_service.models.qwen3_vl:Qwen3VLTower",
    row_shape=lambda vision: (1 + len(vision.get("deepstack_visual_indexes") or ()), int(vision["out_hidden_size"])),
    processors=_PROCESSORS.read,
)
