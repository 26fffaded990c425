"""Checks of an item as it came, before anything is decoded: size, format, options, decoded pixels."""

from __future__ import annotations

import itertools
import math
from functools import partial

from common.errors import InvalidInput
from common.media.item import Embedding, Key, Options, Pixels, Url
from encoder_service.item import Item
from encoder_service.media import sniff
from encoder_service.media.limits import MediaLimits, check_sides
from encoder_service.media.modalities import SPECS, ModalitySpec


def check_item(item: Item, limits: MediaLimits) -> None:
    """Checks size, format and options of an item. Raises InvalidInput with a stable reason and the request field."""
    spec = SPECS[item.modality]
    _check_options(item.options, spec, item.field, limits)
    match item.source:
        case (
            Key() | Embedding() | Url()
        ):  # see `embedding.check` and `Fetcher.check`; what a download brings comes back
            return
        case Pixels() as pixels:
            _check_size(item, spec, limits)
            _check_pixels(pixels, spec, f"{item.field}.pixels", limits)
            _check_pixel_options(pixels, item.options, item.field)
        case data:
            if not data:
                raise InvalidInput("the media is empty", reason="MEDIA_EMPTY", field=f"{item.field}.data")
            _check_size(item, spec, limits)
            sniff.check(data, spec.formats, item.modality, item.mime_type, item.field)


def _check_size(item: Item, spec: ModalitySpec, limits: MediaLimits) -> None:
    max_bytes = 3 * spec.max_area(limits) if isinstance(item.source, Pixels) else spec.max_bytes(limits)
    if item.size > max_bytes:
        raise InvalidInput(f"the media is larger than {max_bytes} bytes", reason=spec.too_large, field=item.field)


def _check_pixels(pixels: Pixels, spec: ModalitySpec, field: str, limits: MediaLimits) -> None:
    def refuse(why: str) -> InvalidInput:
        return InvalidInput(why, reason="BAD_PIXELS", field=field)

    if min(pixels.frames, pixels.height, pixels.width) < 1:
        raise refuse("frames, height and width must be above 0")
    if pixels.frames > spec.max_frames(limits):
        raise refuse("there are too many frames")
    if len(pixels.data) != pixels.frames * pixels.height * pixels.width * 3:
        raise refuse("the data is not frames · height · width · 3 bytes")
    times = pixels.timestamps
    if times and (
        not spec.has_times
        or len(times) != pixels.frames
        or not all(math.isfinite(time) and time >= 0 for time in times)
        or any(after < before for before, after in itertools.pairwise(times))
    ):
        raise refuse("timestamps must be one for each frame of a video, from 0 on, in order")
    check_sides(pixels.width, pixels.height, field, limits)


def _check_options(options: Options, spec: ModalitySpec, field: str, limits: MediaLimits) -> None:
    refuse = partial(_bad_option, field)
    for name in ("min_pixels", "max_pixels"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= limits.max_video_area:
            raise refuse(name, f"must be from 1 to {limits.max_video_area}")
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise refuse("min_pixels", "must not be above max_pixels")
    for name in ("fps", "max_frames"):
        if name not in spec.options and getattr(options, name) is not None:
            raise refuse(name, "is an option of videos alone")
    if options.fps is not None and not (math.isfinite(options.fps) and 0 < options.fps <= 1000):
        raise refuse("fps", "must be above 0 and at most 1000")
    if options.max_frames is not None and not 1 <= options.max_frames <= limits.max_frames:
        raise refuse("max_frames", f"must be from 1 to {limits.max_frames}")


def _check_pixel_options(pixels: Pixels, options: Options, field: str) -> None:
    """All frames that were decoded by the caller are kept, and those that have times are at those times."""
    if options.max_frames is not None:
        raise _bad_option(field, "max_frames", "does not go with decoded frames, which are all kept")
    if options.fps is not None and pixels.timestamps:
        raise _bad_option(field, "fps", "does not go with timestamps")


def _bad_option(field: str, name: str, why: str) -> InvalidInput:
    return InvalidInput(f"{name} {why}", reason="BAD_OPTION", field=f"{field}.options.{name}")
