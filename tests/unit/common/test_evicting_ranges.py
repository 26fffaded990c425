"""Who makes way in an arena, by the policy that it is given."""

from __future__ import annotations

import pytest

from common.shm.arena import Range
from common.shm.evicting_ranges import EvictingRanges

CELL = 64


class Arena:
    """Four cells, each with an idle owner; those of `retained` go last."""

    def __init__(self) -> None:
        self.retained: set[str] = set()
        self.spans: dict[str, Range] = {}
        self.ranges: EvictingRanges[str] = EvictingRanges(
            4 * CELL,
            evict=lambda owner: self.ranges.free(self.spans.pop(owner)),
            is_retained=lambda owner: owner in self.retained,
        )
        for owner in "abcd":
            assert self.put(owner, 1) is not None

    def put(self, owner: str, cells: int) -> Range | None:
        if (span := self.ranges.make_room(cells * CELL)) is not None:
            self.spans[owner] = span
            self.ranges.own(span, owner)
            assert owner not in self.ranges.idle
            self.ranges.let_go(span)
        self.ranges.check_integrity()
        return span


@pytest.fixture
def arena() -> Arena:
    return Arena()


def test_the_least_recently_used_goes_first(arena: Arena) -> None:
    arena.ranges.let_go(arena.spans["a"])
    arena.put("e", 1)
    assert list(arena.ranges.idle) == ["c", "d", "a", "e"]


def test_what_is_used_stays_and_what_is_retained_goes_last(arena: Arena) -> None:
    arena.retained = {"b"}
    arena.ranges.use(arena.spans["a"])
    arena.put("e", 1)
    assert set(arena.spans) == {"a", "b", "d", "e"}
    arena.put("f", 3)
    assert set(arena.spans) == {"a", "f"}


def test_no_owner_is_looked_at_that_is_in_use() -> None:
    """There may be tens of thousands."""
    looked_at: list[str] = []
    ranges: EvictingRanges[str] = EvictingRanges(
        64 * CELL,
        evict=lambda owner: ranges.free(spans[owner]),
        is_retained=lambda owner: bool(looked_at.append(owner)),
    )
    spans = {str(number): Range(number * CELL, CELL) for number in range(64)}
    for owner, span in spans.items():
        ranges.take(span)
        ranges.own(span, owner)
    assert ranges.make_room(CELL) is None
    for owner in ("40", "50", "60"):
        ranges.let_go(spans[owner])
    assert ranges.make_room(2 * CELL) is None
    assert ranges.make_room(CELL) == spans["40"]
    assert {*looked_at} == {"40", "50", "60"}


def test_nobody_goes_where_that_is_not_enough(arena: Arena) -> None:
    arena.ranges.use(arena.spans["b"])
    assert arena.put("e", 3) is None
    assert set(arena.spans) == set("abcd")


def test_a_range_without_an_owner_stays_until_it_is_freed(arena: Arena) -> None:
    span = arena.spans["c"]
    arena.ranges.disown(span)
    assert arena.ranges.owner(span.offset) is None
    assert arena.put("e", 3) is None
    arena.ranges.free(span)
    assert arena.put("e", 3) is not None
