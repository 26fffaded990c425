"""Rows that were computed elsewhere: shape, size and values, checked before they are kept."""

from __future__ import annotations

import numpy as np

from common.errors import InvalidInput
from common.wire import DType, RowLayout
from encoder_service.item import Embedding

_EXPONENT = 0x7F80
"""The exponent bits of a bfloat16; all of them are set in infinities and in what is not a number."""


def check(rows: Embedding, layout: RowLayout, merge: int, max_patches: int, field: str) -> None:
    """Raises InvalidInput unless the rows are those of one picture, in this model's layout.

    The values are not looked at; `check_finite` does that.
    """
    grid = rows.grid
    if (rows.dtype, rows.levels, rows.width) != (layout.dtype, layout.levels, layout.width):
        raise _bad("the element type, levels or width are not this model's", field)
    if grid.t != 1 or min(grid.h, grid.w) < 1 or grid.h % merge or grid.w % merge:
        raise _bad("the grid is not one of a picture", field)
    if grid.patches > max_patches:
        raise _bad(f"the grid has more than {max_patches} patches", field)
    if rows.count != grid.patches // merge**2:
        raise _bad("there must be one row for each square of the grid", field)
    if len(rows.data) != rows.count * layout.row_bytes:
        raise _bad("the data is not count · levels · width elements", field)


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
