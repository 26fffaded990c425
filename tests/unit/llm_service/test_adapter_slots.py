"""Slots of adapters: who runs is pinned, the longest unused gives way, and no slot is ever stale."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm_service.engine.adapter_slots import AdapterSlots


def test_the_longest_unused_gives_way_and_those_that_run_stay() -> None:
    slots = AdapterSlots(2)
    assert slots.assign([1, 0, 2, 1], [1, 2]) == [(0, 1), (1, 2)]
    assert slots.assign([1], [1]) == []
    assert slots.assign([3], [3]) == [(1, 3)], "2 is unused the longest"
    assert slots.assign([4], [3, 4]) == [(0, 4)]
    assert not slots.has_room(5, [3, 4])
    assert slots.has_room(3, [3, 4])
    assert slots.has_room(0, [3, 4])
    slots.forget(3)
    assert slots.assign([5], [4, 5]) == [(1, 5)]
    assert slots.filled == 5
    assert [slots.slot(each) for each in (0, 4, 5)] == [-1, 0, 1]


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60))
def test_what_is_in_a_slot_is_what_was_put_there_last(count: int, moves: list[tuple[bool, int]]) -> None:
    slots, content, running = AdapterSlots(count), {}, set[int]()
    for begins, adapter in moves:
        if begins and slots.has_room(adapter, running):
            running.add(adapter)
        elif not begins:
            running.discard(adapter)
            slots.forget(adapter)
        content |= dict(slots.assign(sorted(running), running))
        assert all(content[slots.slot(each)] == each for each in running)
        slots.check_integrity()
