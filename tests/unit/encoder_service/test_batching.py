"""Batches: within their bounds, oldest first, spread evenly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.media.item import Grid
from encoder_service.engine.batching import Unit, assemble, assemble_full, cut, order
from encoder_service.worker.messages import Piece

PIECE = Piece(modality="image", pixels=0, frames=1, height=1, width=1, resized=(1, 1), grid=(1, 1, 1), tokens=1, rows=0)


def units(sizes: Sequence[int], priorities: Sequence[int] = (), alone: Sequence[bool] = ()) -> list[Unit]:
    loop = asyncio.new_event_loop()
    try:
        return [
            Unit(
                b"",
                PIECE,
                size,
                priorities[index] if priorities else 0,
                index,
                loop.create_future(),
                alone=alone[index] if alone else False,
            )
            for index, size in enumerate(sizes)
        ]
    finally:
        loop.close()


def sizes(batches: list[list[Unit]]) -> list[list[int]]:
    return [[unit.patches for unit in batch] for batch in batches]


def test_the_largest_goes_first_to_the_worker_with_the_least():
    assert sizes(assemble(units([1000, 100, 200, 50]), 2, 4096, 64)) == [[1000], [200, 100, 50]]


def test_the_oldest_goes_even_when_it_is_larger_than_the_budget():
    assert sizes(assemble(units([500, 10]), 1, 100, 64)) == [[500]]


def test_what_does_not_fit_is_passed_over_but_not_for_ever():
    waiting = units([60, 90, 30])
    first = assemble(waiting, 1, 100, 64)
    assert sizes(first) == [[60, 30]]
    assert sizes(assemble([waiting[1]], 1, 100, 64)) == [[90]]


def test_a_higher_priority_goes_before_an_older_one():
    assert sizes(assemble(units([80, 90], priorities=[0, 5]), 1, 100, 64)) == [[90]]


def test_a_suspect_runs_alone():
    assert sizes(assemble(units([10, 20, 30], alone=[False, True, False]), 1, 100, 64)) == [[10, 30]]
    assert sizes(assemble(units([20, 10, 30], alone=[True, False, False]), 1, 100, 64)) == [[20]]


def test_a_batch_for_a_busy_worker_is_full_or_waits():
    def full(*patches: int, alone: Sequence[bool] = ()) -> list[int]:
        return [unit.patches for unit in assemble_full(units(patches, alone=alone), 100, 3)]

    assert full() == full(60) == full(60, 30) == []
    assert full(60, 40) == [60, 40]
    assert full(120) == [120]
    assert full(60, 50) == [60], "the second goes next, with whatever comes"
    assert full(1, 1, 1) == [1, 1, 1]
    assert full(60, 50, alone=(False, True)) == [], "the suspect would wait for ever"


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(-2, 2), st.booleans()), max_size=30),
    st.integers(0, 4),
    st.integers(50, 500),
    st.integers(1, 8),
)
def test_batches_keep_every_bound(rows, workers, budget, most):
    waiting = units(*zip(*rows, strict=True)) if rows else []
    batches = assemble(waiting, workers, budget, most)
    chosen = [unit for batch in batches for unit in batch]
    assert len(batches) <= workers
    assert len(set(map(id, chosen))) == len(chosen)
    assert all(unit in waiting for unit in chosen)
    if waiting and workers:
        assert min(waiting, key=order) in chosen
    for batch in batches:
        assert batch
        assert len(batch) <= most
        assert len(batch) == 1 or sum(unit.patches for unit in batch) <= budget
        assert len(batch) == 1 or not any(unit.alone for unit in batch)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 4), st.integers(50, 500), st.integers(1, 8)
)
def test_everything_is_served_in_the_end(patches, workers, budget, most):
    waiting = units(patches)
    for _ in range(len(patches)):
        done = {id(unit) for batch in assemble(waiting, workers, budget, most) for unit in batch}
        waiting = [unit for unit in waiting if id(unit) not in done]
    assert not waiting


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 5))
def test_each_unit_went_to_the_worker_with_the_least(patches, workers):
    """So no worker has more than another but for the last unit that it got."""
    batches = assemble(units(patches), workers, sum(patches), len(patches))
    loads = [sum(unit.patches for unit in batch) for batch in batches] + [0] * (workers - len(batches))
    assert sum(loads) == sum(patches), "with room for all, all go"
    for batch, load in zip(batches, loads, strict=False):
        assert load - batch[-1].patches <= min(loads)
        assert [unit.patches for unit in batch[1:]] == sorted((unit.patches for unit in batch[1:]), reverse=True)


@given(st.integers(1, 100), st.integers(50, 100), st.integers(1, 2**31 - 1))
def test_a_flood_of_higher_priority_passes_a_unit_so_often_and_no_more(patches, flood, priority):
    patient, budget = units([patches], [-priority])[0], 100
    for number in range(1, 1000):
        rival = units([flood], [priority])[0]
        rival.number = number
        (batch,) = assemble([patient, rival], 1, budget, 1)
        if batch == [patient]:
            break
        patient.passed += 1
    assert patient.passed == 32


def test_a_video_is_cut_at_frame_groups():
    assert cut(Grid(5, 10, 10), 250, 1, 2048) == [(0, 2), (2, 4), (4, 5)]
    assert cut(Grid(8, 10, 10), 16384, 2, 300) == [(0, 4), (4, 8)]
    assert cut(Grid(8, 10, 10), 16384, 2, 2048) == [(0, 8)]
    assert cut(Grid(1, 40, 40), 100, 4, 10) == [(0, 1)]


@given(
    st.integers(1, 400),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 5000),
    st.integers(1, 8),
    st.integers(1, 3000),
)
def test_runs_cover_a_video_once_and_keep_the_budget(t, h, w, budget, workers, worth):
    runs = cut(Grid(t, h, w), budget, workers, worth)
    assert [frame for first, end in runs for frame in range(first, end)] == list(range(t))
    assert all(end - first == 1 or (end - first) * h * w <= budget for first, end in runs)
