"""Every limit on media, and the checks of headers and plans, each before the expensive step that it guards. Each raises
`InvalidInput` with a stable reason and the request field."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from common.config import option, size
from common.errors import InvalidInput
from encoder_service.item import Inspection, Plan
from encoder_service.media.messages import Bounds

MAX_SECONDS = 1e7
"""The latest time in a video, 115 days. Times are written into prompts, and counted in positions of 32 bits."""


@dataclass(frozen=True, kw_only=True)  # no slots: the service's configuration has two bases
class MediaLimits:
    """Limits of media. Areas are in pixels: width times height."""

    max_image_bytes: int = option(20 << 20, "largest encoded picture", parse=size, minimum=1, group="limits on media")
    max_video_bytes: int = option(64 << 20, "largest encoded video", parse=size, minimum=1)
    max_image_area: int = option(16_800_000, "largest picture or video frame, in pixels", minimum=16)
    max_video_area: int = option(
        128_000_000,
        "largest sum of a video's kept frames, in pixels; beyond it they are resized as they are decoded",
        minimum=16,
    )
    min_side: int = option(4, "shortest side of a picture or frame, in pixels", minimum=1)
    max_side: int = option(16384, "longest side of a picture or frame, in pixels", minimum=1)
    max_ratio: float = option(200.0, "greatest ratio of a picture's sides", minimum=1)
    max_frames: int = option(768, "most frames kept of a video; sampled at more, it is refused", minimum=1)
    max_scanned_frames: int = option(100_000, "most frames that a video may have", minimum=1)
    max_image_chunks: int = option(
        32_768, "most chunks, segments, blocks or tags that a picture's file may be made of", minimum=64
    )
    max_image_scans: int = option(100, "most scans of a JPEG", minimum=1)
    max_packed_bmp_bytes: int = option(
        4 << 20, "most bytes of a BMP with run lengths, which are slow to unpack", parse=size, minimum=1
    )
    max_video_chunks: int = option(
        500_000, "most boxes, elements or packets that a video's file may be made of", minimum=64
    )
    max_audio_bytes: int = option(
        32 << 20, "largest encoded sound, a video with its track included", parse=size, minimum=1
    )
    max_audio_seconds: float = option(600.0, "longest sound; a model may take less", minimum=0.1)
    max_audio_rate: int = option(192_000, "most samples of sound in a second", minimum=1)
    max_audio_channels: int = option(8, "most channels of sound", minimum=1)
    max_images: int = option(16, "most pictures in one request", minimum=1)
    max_videos: int = option(2, "most videos in one request", minimum=1)
    max_audios: int = option(4, "most sounds in one request", minimum=1)

    @property
    def bounds(self) -> Bounds:
        """The limits that decode processes apply before a decoder runs."""
        return Bounds(
            image_area=self.max_image_area,
            image_chunks=self.max_image_chunks,
            image_scans=self.max_image_scans,
            packed_bmp_bytes=self.max_packed_bmp_bytes,
            video_chunks=self.max_video_chunks,
            audio_seconds=self.max_audio_seconds,
            audio_rate=self.max_audio_rate,
            audio_channels=self.max_audio_channels,
        )


def check_picture(seen: Inspection, field: str, limits: MediaLimits) -> None:
    """Checks a picture's dimensions before it is decoded."""
    check_sides(seen.width, seen.height, field, limits)


def check_video(seen: Inspection, field: str, limits: MediaLimits) -> None:
    """Checks a video's header before frames are decoded."""
    check_sides(seen.width, seen.height, field, limits)
    if not math.isfinite(seen.fps) or not 0 < seen.fps <= 1000 or seen.frames < 1:
        raise InvalidInput("the video has no usable frame rate or length", reason="VIDEO_UNREADABLE", field=field)
    if seen.frames > limits.max_scanned_frames:
        raise InvalidInput(
            f"the video has more than {limits.max_scanned_frames} frames", reason="VIDEO_TOO_LONG", field=field
        )
    if seen.track is not None:
        check_sound(seen.track, field, limits)


def check_sound(seen: Inspection, field: str, limits: MediaLimits) -> None:
    """Checks a file's sound, which was decoded as far as the limits allow."""
    if not 0 < seen.fps <= limits.max_audio_rate or not 0 < seen.channels <= limits.max_audio_channels:
        raise InvalidInput(
            f"the sound must have at most {limits.max_audio_rate} samples a second, of {limits.max_audio_channels} "
            "channels",
            reason="AUDIO_FORMAT",
            field=field,
        )
    if seen.frames > limits.max_audio_seconds * seen.rate:
        raise InvalidInput(
            f"the sound lasts more than {limits.max_audio_seconds:g} seconds",
            reason="AUDIO_TOO_LONG",
            field=field,
        )


def check_plan(plan: Plan, field: str, limits: MediaLimits, max_patches: int) -> None:
    """Checks what would be decoded and computed. `max_patches` bounds one frame group."""
    if len(plan.frames) > 1 and plan.pixels > limits.max_video_area:
        raise InvalidInput(
            f"the kept frames have more than {limits.max_video_area} pixels together; sample fewer",
            reason="VIDEO_TOO_LARGE",
            field=field,
        )
    if len(set(plan.frames)) > limits.max_frames:  # frames that fill the last frame group are repeated
        raise InvalidInput(
            f"more than {limits.max_frames} of the video's frames would be kept; sample fewer",
            reason="VIDEO_TOO_LONG",
            field=field,
        )
    check_length(max(plan.seconds_per_grid, *plan.timestamps, 0.0), field)
    if plan.grid.h * plan.grid.w > max_patches:
        raise InvalidInput(
            f"after resizing, the media has more than {max_patches} patches a frame; lower max_pixels",
            reason="TOO_MANY_PATCHES",
            field=field,
        )


def fitted(plan: Plan, limits: MediaLimits) -> Plan:
    """The plan of a video whose frames would be too large together, changed so that each is resized as soon as it is
    decoded, by Pillow instead of torch, which changes some values by one grey level. Other plans are returned
    unchanged."""
    if len(plan.frames) <= 1 or plan.pixels <= limits.max_video_area or plan.resized == (plan.height, plan.width):
        return plan
    height, width = plan.resized
    return replace(plan, height=height, width=width, whole=(plan.height, plan.width))


def check_length(seconds: float, field: str) -> None:
    """Checks the latest time in a video."""
    if seconds > MAX_SECONDS:
        raise InvalidInput(f"the video lasts more than {MAX_SECONDS:.0f} seconds", reason="VIDEO_TOO_LONG", field=field)


def check_sides(width: int, height: int, field: str, limits: MediaLimits) -> None:
    """Checks the sides of a picture or frame."""
    short, long = min(width, height), max(width, height)
    if short < limits.min_side:
        raise InvalidInput(f"a side is shorter than {limits.min_side} pixels", reason="IMAGE_TOO_SMALL", field=field)
    if long > limits.max_side or width * height > limits.max_image_area:
        raise InvalidInput(
            f"larger than {limits.max_image_area} pixels, or {limits.max_side} on a side",
            reason="IMAGE_TOO_LARGE",
            field=field,
        )
    if long / short > limits.max_ratio:
        raise InvalidInput(
            f"the sides differ by more than {limits.max_ratio:g} to 1", reason="IMAGE_RATIO", field=field
        )
