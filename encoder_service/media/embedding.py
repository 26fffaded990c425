"""Rows that were computed elsewhere: shape, size and values, checked before they are kept."""

from __future__ import annotations

import itertools
import math

import numpy as np

from common.errors import InvalidInput
from common.media.item import Embedding, Modality
from common.wire import DType, RowLayout
from encoder_service.item import Item
from encoder_service.media.limits import MOST_SECONDS

_EXPONENT = 0x7F80
"""The exponent bits of a bfloat16; all of them are set in infinities and in what is not a number."""


def check(rows: Embedding, item: Item, layout: RowLayout, merge: int, max_patches: int, max_groups: int) -> None:
    """Raises InvalidInput unless the rows are those of one picture or video, in this model's layout.

    `max_patches` is the most of one frame group, `max_groups` the most frame groups. The values are not looked at;
    `check_finite` does that.
    """
    grid, field, video = rows.grid, f"{item.field}.embedding", item.modality is Modality.VIDEO
    if (rows.dtype, rows.levels, rows.width) != (layout.dtype, layout.levels, layout.width):
        raise _bad("the element type, levels or width are not this model's", field)
    if not 1 <= grid.t <= (max_groups if video else 1) or min(grid.h, grid.w) < 1 or grid.h % merge or grid.w % merge:
        raise _bad(f"the grid is not one of a {item.modality}", field)
    if grid.h * grid.w > max_patches:
        raise _bad(f"the grid has more than {max_patches} patches", field)
    _check_times(rows, field, video=video)
    if rows.count != grid.patches // merge**2:
        raise _bad("there must be one row for each square of the grid", field)
    if len(rows.data) != rows.count * layout.row_bytes:
        raise _bad("the data is not count · levels · width elements", field)


def _check_times(rows: Embedding, field: str, *, video: bool) -> None:
    times, apart = rows.timestamps, rows.seconds_per_grid
    if not video:
        if times or apart:
            raise _bad("a picture has no times", field)
        return
    if len(times) != rows.grid.t or not all(math.isfinite(time) and time >= 0 for time in times):
        raise _bad("there must be one timestamp for each frame group, from 0 on", field)
    if any(after < before for before, after in itertools.pairwise(times)):
        raise _bad("the timestamps must be in order", field)
    if not (math.isfinite(apart) and apart > 0):
        raise _bad("seconds_per_grid must be above 0", field)
    if max(apart, times[-1]) > MOST_SECONDS:
        raise _bad(f"a time is beyond {MOST_SECONDS:.0f} seconds", field)


def check_finite(rows: Embedding, field: str) -> None:
    """Raises InvalidInput where a value is infinite or not a number. Takes milliseconds for megabytes."""
    if rows.dtype is DType.BFLOAT16:
        finite = bool(((np.frombuffer(rows.data, "<u2") & _EXPONENT) != _EXPONENT).all())
    else:
        kind = "<f4" if rows.dtype is DType.FLOAT32 else "<f2"
        finite = bool(np.isfinite(np.frombuffer(rows.data, kind)).all())
    if not finite:
        raise _bad("a value is infinite or not a number", field)


def _bad(why: str, field: str) -> InvalidInput:
    return InvalidInput(why, reason="BAD_EMBEDDING", field=field)
