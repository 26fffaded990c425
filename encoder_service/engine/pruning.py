"""Pruning of a video's rows before they are sent: drops the rows that differ least from the row at the same position
one frame group earlier (Efficient Video Sampling, https://arxiv.org/abs/2510.14624). How many stay follows from the
video's size; which ones is known when all rows are computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.errors import InvalidInput, Unsupported
from common.media import kept_rows
from common.media.item import Options
from common.rows.wire import DType, RowLayout
from encoder_service.item import Plan, Pruning

_AT_ONCE = 1024
"""Rows that are moved together."""
_LEAST_NORM = np.float32(1e-8)


def pruned(plan: Plan, options: Options, merge: int, field: str) -> Plan:
    """A video's plan with the number of rows kept: max(rows of a frame group, ⌊rows · (1 − rate)⌋), or the caller's.

    Raises InvalidInput for rows that the video does not have, and Unsupported if rows are not those of the grid.
    """
    if not options.video_pruning_rate and options.kept_rows is None:
        return plan
    if plan.tokens != plan.grid.patches // merge**2:
        raise Unsupported(
            "this model's rows cannot be pruned", reason="NO_PRUNING", field=f"{field}.options.video_pruning_rate"
        )
    if options.kept_rows is None:
        assert options.video_pruning_rate is not None, "one of the two is given"
        pruning = Pruning(max(plan.tokens // plan.grid.t, int(plan.tokens * (1 - options.video_pruning_rate))))
    elif kept_rows.fits(options.kept_rows, plan.tokens):
        pruning = Pruning(kept_rows.count(options.kept_rows), options.kept_rows)
    else:
        raise InvalidInput(
            f"kept_rows are not some of the video's {plan.tokens} rows",
            reason="BAD_OPTION",
            field=f"{field}.options.kept_rows",
        )
    return replace(plan, pruning=pruning) if pruning.count < plan.tokens else plan


def choose(data: memoryview, groups: int, count: int, layout: RowLayout) -> bytes:
    """The `count` rows to keep of a video's [groups · places, levels, width], as bits (`common.media.kept_rows`).

    A row's change is 1 − cos to the one before it at the same position, in the level that prompts begin with. Rows of
    the first frame group change most, and of equal changes the earlier row stays. It is computed as half the squared
    distance of unit vectors, which is exactly 0 if nothing moves. Takes seconds for gigabytes.
    """
    rows = _first_level(data, layout)
    places = len(rows) // groups
    change = np.full(len(rows), np.inf, np.float32)
    before = _unit(rows[:places])
    for at in range(places, len(rows), places):
        now = _unit(rows[at : at + places])
        before -= now
        change[at : at + places] = np.einsum("rw,rw->r", before, before) / 2
        before = now
    kept = np.zeros(len(rows), np.bool_)
    kept[np.argsort(-change, kind="stable")[:count]] = True
    return kept_rows.pack(kept)


def compact(data: memoryview, kept: bytes, row_bytes: int) -> None:
    """Moves kept rows to the front, in order; what follows them is invalid. Rows only move forward, so none is
    overwritten before it has moved."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes)
    places = np.flatnonzero(kept_rows.unpack(kept, len(rows)))
    for at in range(0, len(places), _AT_ONCE):
        some = places[at : at + _AT_ONCE]
        rows[at : at + len(some)] = rows[some]


def _first_level(data: memoryview, layout: RowLayout) -> np.ndarray:
    """[rows, width] of each row's first level, as a view; bfloat16 as uint16."""
    numbers = np.frombuffer(data, {DType.FLOAT32: "<f4", DType.FLOAT16: "<f2", DType.BFLOAT16: "<u2"}[layout.dtype])
    return numbers.reshape(-1, layout.levels, layout.width)[:, 0]


def _unit(rows: np.ndarray) -> np.ndarray:
    """The rows as float32, each divided by its length."""
    wide = (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)
    lengths = np.sqrt(np.einsum("rw,rw->r", wide, wide))[:, None]
    wide /= np.maximum(lengths, _LEAST_NORM)
    return wide
