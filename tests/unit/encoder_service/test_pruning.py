"""Which rows of a video are kept, against the definition written down anew, and how they move together."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvalidInput, Unsupported
from common.media import kept_rows
from common.media.item import Grid, Options
from common.rows.wire import DType, RowLayout
from encoder_service.engine.pruning import choose, compact, pruned
from encoder_service.item import Plan

PLAN = Plan(Grid(6, 4, 8), 48, tuple(range(12)), 64, 128, (64, 128))  # 8 rows a frame group


def by_definition(rows: np.ndarray, groups: int, count: int) -> list[int]:
    """Rows [groups · places, levels, width]: 1 − cos to the frame group before; the first one is above all."""
    first = rows[:, 0].astype(np.float64).reshape(groups, -1, rows.shape[-1])
    ranked = []
    for group in range(groups):
        for place in range(first.shape[1]):
            change = np.inf
            if group:
                now, before = first[group, place], first[group - 1, place]
                change = 1 - now @ before / np.linalg.norm(now) / np.linalg.norm(before)
            ranked.append((-change, group * first.shape[1] + place))
    return sorted(number for _, number in sorted(ranked)[:count])


def drawn(groups: int, places: int, layout: RowLayout, seed: int = 0) -> np.ndarray:
    """float32 rows [groups · places, levels, width] of which some change little, exact in the layout's type."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((1, places, layout.levels, layout.width))
    steps = rng.standard_normal((groups - 1, *rows.shape[1:])) * rng.choice([0.1, 0.5, 1.0], (groups - 1, places, 1, 1))
    wide = np.concatenate([rows, rows + np.cumsum(steps, 0)]).reshape(-1, *rows.shape[2:]).astype(np.float32)
    if layout.dtype is DType.BFLOAT16:
        return (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return wide.astype(layout.dtype.value).astype(np.float32)


def as_bytes(rows: np.ndarray, dtype: DType) -> bytearray:
    if dtype is DType.BFLOAT16:
        return bytearray((rows.view(np.uint32) >> 16).astype("<u2").tobytes())
    return bytearray(rows.astype(dtype.value).tobytes())


def kept(data: bytearray, groups: int, count: int, layout: RowLayout) -> list[int]:
    total = len(data) // layout.row_bytes
    bits = choose(memoryview(data), groups, count, layout)
    assert kept_rows.fits(bits, total)
    assert kept_rows.count(bits) == count
    return np.flatnonzero(kept_rows.unpack(bits, total)).tolist()


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("count", [13, 40, 77, 78])
def test_rows_that_change_most_are_kept_and_the_first_frame_group_before_all(dtype, count):
    layout = RowLayout(levels=2, width=24, dtype=dtype)
    rows = drawn(6, 13, layout, seed=count)
    found = kept(as_bytes(rows, dtype), 6, count, layout)
    assert found == by_definition(rows, 6, count)
    assert found[:13] == list(range(13))


def test_of_what_stands_still_the_earlier_rows_are_kept():
    layout = RowLayout(levels=1, width=33, dtype=DType.FLOAT32)
    still = np.tile(drawn(2, 7, layout)[7:], (5, 1, 1))
    moving = still.copy()
    moving[30] *= -1
    assert kept(as_bytes(still, DType.FLOAT32), 5, 12, layout) == list(range(12))
    assert kept(as_bytes(moving, DType.FLOAT32), 5, 9, layout) == [*range(7), 7, 30]


def test_rows_without_a_direction_are_no_numbers_out_of_range():
    layout = RowLayout(levels=1, width=4, dtype=DType.FLOAT16)
    rows = np.zeros((9, 1, 4), np.float32)
    rows[4] = 1
    assert kept(as_bytes(rows, DType.FLOAT16), 3, 4, layout) == [0, 1, 2, 4]


@pytest.mark.parametrize("count", [1, 500, 2999, 3000])
def test_rows_that_are_kept_move_together_in_order(count):
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 256, (3000, 20), dtype=np.uint8)
    mask = np.zeros(3000, np.bool_)
    mask[rng.permutation(3000)[:count]] = True
    data = bytearray(rows.tobytes())
    compact(memoryview(data), kept_rows.pack(mask), 20)
    assert data[: 20 * count] == rows[mask].tobytes()


@pytest.mark.parametrize(("rate", "count"), [(0.5, 24), (0.9, 8), (0.01, 47), (0.999999, 8)])
def test_a_rate_says_how_many_rows_stay(rate, count):
    plan = pruned(PLAN, Options(video_pruning_rate=rate), 2, "here")
    assert (plan.tokens, plan.kept, plan.grid) == (48, count, PLAN.grid)


@pytest.mark.parametrize("options", [Options(), Options(video_pruning_rate=0.0), Options(kept_rows=b"\xff" * 6)])
def test_where_every_row_stays_nothing_is_pruned(options):
    assert pruned(PLAN, options, 2, "here") == PLAN


def test_rows_that_the_caller_names_stay():
    plan = pruned(PLAN, Options(kept_rows=bytes.fromhex("010000000080")), 2, "here")
    assert (plan.kept, plan.pruning.kept_rows.hex()) == (2, "010000000080")
    for wrong in (b"", b"\xff", bytes(6), b"\xff" * 7):
        with pytest.raises(InvalidInput) as error:
            pruned(PLAN, Options(kept_rows=wrong), 2, "here")
        assert (error.value.reason, error.value.field) == ("BAD_OPTION", "here.options.kept_rows")


def test_rows_that_are_not_the_grids_are_not_pruned():
    with pytest.raises(Unsupported) as error:
        pruned(PLAN, Options(video_pruning_rate=0.5), 4, "here")
    assert error.value.reason == "NO_PRUNING"
