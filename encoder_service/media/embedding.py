"""Rows that were computed elsewhere: shape, size and values, checked before they are kept."""

from __future__ import annotations

import itertools
import math

from common.errors import InvalidInput
from common.media.item import Embedding
from common.wire import RowLayout, all_finite
from encoder_service.item import Item
from encoder_service.media.limits import MAX_SECONDS, MediaLimits
from encoder_service.media.modalities import SPECS


def check(rows: Embedding, item: Item, layout: RowLayout, merge: int, max_patches: int, limits: MediaLimits) -> None:
    """Raises InvalidInput unless the rows are those of one picture or video, in this model's layout.

    `max_patches` is the most of one frame group. The values are not looked at; `check_finite` does that.
    """
    grid, field, spec = rows.grid, f"{item.field}.embedding", SPECS[item.modality]
    if (rows.dtype, rows.levels, rows.width) != (layout.dtype, layout.levels, layout.width):
        raise _bad("the element type, levels or width are not this model's", field)
    if not 1 <= grid.t <= spec.max_frames(limits) or min(grid.h, grid.w) < 1 or grid.h % merge or grid.w % merge:
        raise _bad(f"the grid is not one of a {item.modality}", field)
    if grid.h * grid.w > max_patches:
        raise _bad(f"the grid has more than {max_patches} patches", field)
    _check_times(rows, field, has_times=spec.has_times)
    if rows.count != grid.patches // merge**2:
        raise _bad("there must be one row for each square of the grid", field)
    if len(rows.data) != rows.count * layout.row_bytes:
        raise _bad("the data is not count · levels · width elements", field)


def _check_times(rows: Embedding, field: str, *, has_times: bool) -> None:
    times, apart = rows.timestamps, rows.seconds_per_grid
    if not has_times:
        if times or apart:
            raise _bad("a picture has no times", field)
        return
    if len(times) != rows.grid.t or not all(math.isfinite(time) and time >= 0 for time in times):
        raise _bad("there must be one timestamp for each frame group, from 0 on", field)
    if any(after < before for before, after in itertools.pairwise(times)):
        raise _bad("the timestamps must be in order", field)
    if not (math.isfinite(apart) and apart > 0):
        raise _bad("seconds_per_grid must be above 0", field)
    if max(apart, times[-1]) > MAX_SECONDS:
        raise _bad(f"a time is beyond {MAX_SECONDS:.0f} seconds", field)


def check_finite(rows: Embedding, field: str) -> None:
    """Raises InvalidInput where a value is infinite or not a number. Takes milliseconds for megabytes."""
    assert rows.dtype is not None, "it is the model's"
    if not all_finite(rows.data, rows.dtype):
        raise _bad("a value is infinite or not a number", field)


def _bad(why: str, field: str) -> InvalidInput:
    return InvalidInput(why, reason="BAD_EMBEDDING", field=field)
