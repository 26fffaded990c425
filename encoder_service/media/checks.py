"""Checks of an item as it came, before anything is decoded: size, format, options, pixels, rows from elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

from common.errors import InvalidInput, TwinlensError, Unsupported
from common.media import kept_rows
from common.media.item import HEADER_SHAPES, Embedding, Key, Modality, Options, Pixels, Url
from common.rows.wire import RowLayout, all_finite
from encoder_service.item import Inspection, Item
from encoder_service.media import sniff
from encoder_service.media.limits import MAX_SECONDS, MediaLimits, check_length, check_sides
from encoder_service.media.modalities import SPECS, ModalitySpec


def check_item(item: Item, limits: MediaLimits) -> None:
    """Checks size, format and options of an item. Raises InvalidInput with a stable reason and the request field."""
    spec = SPECS[item.modality]
    _check_options(item.options, spec, item.field, limits)
    match item.source:
        case Key() | Embedding() | Url():  # see `check_rows` and `Fetcher.check`; downloads are checked later
            return
        case Pixels() if not spec.has_pixels:
            raise InvalidInput(f"pixels are not {item.modality}", reason="BAD_PIXELS", field=f"{item.field}.pixels")
        case Pixels() as pixels:
            _check_size(item, spec, limits)
            _check_pixels(pixels, item, spec, limits)
            _check_pixel_options(pixels, item.options, item.field)
        case data:
            if not data:
                raise InvalidInput("the media is empty", reason="MEDIA_EMPTY", field=f"{item.field}.data")
            _check_size(item, spec, limits)
            if item.options.with_sound:
                _check_size(item, SPECS[Modality.AUDIO], limits)
            sniff.check(data, spec.formats, item.modality, item.mime_type, item.field)


def _check_size(item: Item, spec: ModalitySpec, limits: MediaLimits) -> None:
    max_bytes = 3 * spec.max_area(limits) if isinstance(item.source, Pixels) else spec.max_bytes(limits)
    if item.size > max_bytes:
        raise InvalidInput(f"the media is larger than {max_bytes} bytes", reason=spec.too_large, field=item.field)


def _check_pixels(pixels: Pixels, item: Item, spec: ModalitySpec, limits: MediaLimits) -> None:
    field, has_times = f"{item.field}.pixels", HEADER_SHAPES[item.modality].has_times

    def refuse(why: str) -> InvalidInput:
        return InvalidInput(why, reason="BAD_PIXELS", field=field)

    if min(pixels.frames, pixels.height, pixels.width) < 1:
        raise refuse("frames, height and width must be above 0")
    if pixels.frames > spec.max_frames(limits):
        raise refuse("there are too many frames")
    if len(pixels.data) != pixels.frames * pixels.height * pixels.width * 3:
        raise refuse("the data is not frames · height · width · 3 bytes")
    times = pixels.timestamps
    if times and not (has_times and len(times) == pixels.frames and _are_times(times) and _in_order(times)):
        raise refuse("timestamps must be one for each frame of a video, from 0 on, in order")
    check_length(times[-1] if times else 0.0, item.field)
    check_sides(pixels.width, pixels.height, field, limits)


def _check_options(options: Options, spec: ModalitySpec, field: str, limits: MediaLimits) -> None:
    refuse = partial(_bad_option, field)
    for name in options.stated():
        if name not in spec.options:
            raise refuse(name, "is not an option of this kind of media")
    for name in ("min_pixels", "max_pixels"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= limits.max_video_area:
            raise refuse(name, f"must be from 1 to {limits.max_video_area}")
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise refuse("min_pixels", "must not be above max_pixels")
    if options.fps is not None and not (math.isfinite(options.fps) and 0 < options.fps <= 1000):
        raise refuse("fps", "must be above 0 and at most 1000")
    if options.max_frames is not None and not 1 <= options.max_frames <= limits.max_frames:
        raise refuse("max_frames", f"must be from 1 to {limits.max_frames}")
    if options.video_pruning_rate is not None and not 0 <= options.video_pruning_rate < 1:  # a NaN as well
        raise refuse("video_pruning_rate", "must be at least 0 and below 1")
    if options.video_pruning_rate and options.kept_rows is not None:
        raise refuse("video_pruning_rate", "does not go with kept_rows")
    if options.with_sound and (options.video_pruning_rate or options.kept_rows is not None):
        raise refuse("with_sound", "does not go with dropped rows")


def check_listed(seen: Inspection, item: Item) -> None:
    """The same of a video that is a list of frames. Raises InvalidInput."""
    if seen.listed:
        _check_pixel_options(seen.as_given, item.options, item.field)


def _check_pixel_options(pixels: Pixels, options: Options, field: str) -> None:
    """All frames that the caller has decoded or listed are kept, and stated times are used."""
    if options.max_frames is not None:
        raise _bad_option(field, "max_frames", "does not go with a list of frames, which are all kept")
    if options.fps is not None and pixels.timestamps:
        raise _bad_option(field, "fps", "does not go with timestamps")
    if options.with_sound:
        raise _bad_option(field, "with_sound", "does not go with a list of frames, which have none")


def no_video_sound(field: str) -> TwinlensError:
    """The error for a model that cannot take a video's sound between its frames."""
    why = "this model does not take a video together with its sound"
    return Unsupported(why, reason="NO_VIDEO_SOUND", field=f"{field}.options.with_sound")


def _are_times(seconds: Sequence[float]) -> bool:
    return all(math.isfinite(each) and each >= 0 for each in seconds)


def _in_order(seconds: Sequence[float]) -> bool:
    return all(before <= after for before, after in itertools.pairwise(seconds))


def _bad_option(field: str, name: str, why: str) -> InvalidInput:
    return InvalidInput(f"{name} {why}", reason="BAD_OPTION", field=f"{field}.options.{name}")


def check_rows(
    rows: Embedding, item: Item, layout: RowLayout, squares: int, max_patches: int, limits: MediaLimits
) -> None:
    """Raises InvalidInput unless the rows are those of one item, in this model's layout.

    `squares` are the rows of its whole grid, 0 if no item has such a grid; `max_patches` bounds one frame group. Values
    are not checked; `check_finite` does that.
    """
    grid, field, spec = rows.grid, f"{item.field}.embedding", SPECS[item.modality]
    if (rows.dtype, rows.levels, rows.width) != (layout.dtype, layout.levels, layout.width):
        raise _bad_rows("the element type, levels or width are not this model's", field)
    if not 1 <= grid.t <= spec.max_frames(limits) or min(grid.h, grid.w) < 1 or squares < 1:
        raise _bad_rows(f"the grid is not one of a {item.modality}", field)
    if grid.h * grid.w > max_patches:
        raise _bad_rows(f"the grid has more than {max_patches} patches", field)
    _check_times(rows, field, has_times=HEADER_SHAPES[item.modality].has_times)
    if rows.kept_rows and not ("kept_rows" in spec.options and kept_rows.fits(rows.kept_rows, squares)):
        raise _bad_rows("kept_rows are not those of the video's grid", field)
    if rows.count != (kept_rows.count(rows.kept_rows) if rows.kept_rows else squares):
        raise _bad_rows("there must be one row for each square of the grid that is kept", field)
    if len(rows.data) != rows.count * layout.row_bytes:
        raise _bad_rows("the data is not count · levels · width elements", field)


def _check_times(rows: Embedding, field: str, *, has_times: bool) -> None:
    times, apart = rows.timestamps, rows.seconds_per_grid
    if not has_times:
        if times or apart:
            raise _bad_rows("a picture has no times", field)
        return
    if len(times) != rows.grid.t or not _are_times(times):
        raise _bad_rows("there must be one timestamp for each frame group, from 0 on", field)
    if not _in_order(times):
        raise _bad_rows("the timestamps must be in order", field)
    if not (math.isfinite(apart) and apart > 0):
        raise _bad_rows("seconds_per_grid must be above 0", field)
    if max(apart, times[-1]) > MAX_SECONDS:
        raise _bad_rows(f"a time is beyond {MAX_SECONDS:.0f} seconds", field)


def check_finite(rows: Embedding, field: str) -> None:
    """Raises InvalidInput if a value is infinite or not a number. Takes milliseconds for megabytes."""
    assert rows.dtype is not None, "it is the model's"
    if not all_finite(rows.data, rows.dtype):
        raise _bad_rows("a value is infinite or not a number", field)


def _bad_rows(why: str, field: str) -> InvalidInput:
    return InvalidInput(why, reason="BAD_EMBEDDING", field=field)
