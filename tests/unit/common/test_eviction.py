"""What makes way in an arena, beside a search through all that could."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.shm.arena import ALIGNMENT, RangeAllocator
from common.shm.eviction import LastUse, lightest, window

Pieces = list[tuple[int, str]]


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["gap", "held", "idle", "idle", "idle", "kept"])), max_size=24
    ),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_neighbours_make_way_that_were_used_the_longest_ago_and_none_that_may_not(pieces: Pieces, cells, random):
    ranges = RangeAllocator(sum(cells for cells, _ in pieces) * ALIGNMENT)
    spans = [(ranges.allocate(cells * ALIGNMENT), kind) for cells, kind in pieces]
    uses = random.sample(range(100), len(spans))
    used: dict[int, LastUse] = {}
    for (span, kind), use in zip(spans, uses, strict=True):
        assert span is not None
        if kind == "gap":
            ranges.free(span)
        elif kind != "held":
            used[span.offset] = (int(kind == "kept"), use)
    size = cells * ALIGNMENT
    held = {span.offset for span, kind in spans if span is not None and kind == "held"}
    going = window(ranges, size, sorted(used, key=used.__getitem__), used.get, held)
    windows = _windows(ranges, size, used)
    if not windows or not all(windows):  # nothing is enough, or nothing need go
        assert windows or not going
        return
    assert going in windows
    newest = max(used[start] for start in going)
    best = min(max(used[start] for start in each) for each in windows)
    assert newest[0] == best[0], "what is to be kept goes last"
    assert len(used) > 8 or newest == best
    for start in going:
        ranges.free(next(span for span, _ in spans if span is not None and span.offset == start))
    assert ranges.allocate(size) is not None


def _windows(ranges: RangeAllocator, size: int, used: dict[int, LastUse]) -> list[list[int]]:
    """All runs of ranges that may go and make room, of which none is needed less; an empty one where there is room."""
    starts, found = ranges.starts, []
    edges = [0, *map(ranges.end, starts)], [*starts, ranges.capacity]
    for first in range(len(starts) + 1):
        for end in range(first, len(starts) + 1):
            if end > first and starts[end - 1] not in used:
                break
            if edges[1][end] - edges[0][first] >= size:
                found.append(starts[first:end])
                break
    return found


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 3)), min_size=1, max_size=24),
    st.integers(1, 40),
)
def test_those_make_way_that_weigh_the_least_where_all_may(pieces: list[tuple[int, bool, int]], cells: int):
    ranges = RangeAllocator(sum(cells for cells, _, _ in pieces) * ALIGNMENT)
    spans = [ranges.allocate(cells * ALIGNMENT) for cells, _, _ in pieces]
    weights: dict[int, int] = {}
    for span, (_, gap, weight) in zip(spans, pieces, strict=True):
        assert span is not None
        if gap:
            ranges.free(span)
        else:
            weights[span.offset] = weight
    size = cells * ALIGNMENT
    windows = _windows(ranges, size, dict.fromkeys(weights, (0, 0)))
    if not windows or not all(windows):
        return
    room, going = lightest(ranges, size, weights.__getitem__)
    assert going in windows
    assert sum(map(weights.__getitem__, going)) == min(sum(map(weights.__getitem__, each)) for each in windows)
    assert room.size >= size
    for start in going:
        ranges.free(next(span for span in spans if span is not None and span.offset == start))
    ranges.take(room)
    ranges.check_integrity()


def test_the_search_looks_at_a_few_of_many() -> None:
    ranges = RangeAllocator(10_000 * ALIGNMENT)
    starts = [span.offset for _ in range(10_000) if (span := ranges.allocate(ALIGNMENT))]
    asked = 0

    def last_use(start: int) -> LastUse:
        nonlocal asked
        asked += 1
        return 0, start * 7919 % (10_000 * ALIGNMENT + 1)

    oldest = sorted(starts, key=lambda start: start * 7919 % (10_000 * ALIGNMENT + 1))
    assert window(ranges, ALIGNMENT, oldest, last_use, []) == [oldest[0]]
    assert asked < 10, "the oldest is enough"
    assert len(window(ranges, 10 * ALIGNMENT, oldest, last_use, [])) == 10
    assert asked < 300


@pytest.mark.parametrize("roomy", [False, True])
def test_where_few_have_room_around_them_not_all_are_looked_at(roomy: bool) -> None:
    ranges = RangeAllocator(3000 * ALIGNMENT)
    starts = [span.offset for _ in range(3000) if (span := ranges.allocate(ALIGNMENT))]
    held = {start for start in starts[::30] if not roomy or start != 2400 * ALIGNMENT}
    asked = 0

    def last_use(start: int) -> LastUse | None:
        nonlocal asked
        asked += 1
        return None if start in held else (0, start)

    oldest = [start for start in starts if start not in held]
    found = window(ranges, 30 * ALIGNMENT, oldest, last_use, held)
    assert found == ([(2371 + at) * ALIGNMENT for at in range(30)] if roomy else [])
    assert asked < 700
