"""The accounts of device pools: who gets room, what gives way, what readers keep, and what a worker's death ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from encoder_service.engine.device_pool import DevicePool, DevicePools, Slice
from encoder_service.worker.messages import PoolMade

ROW = 64
MADE = PoolMade("GPU-0", b"handle", 8 * ROW)


@pytest.fixture
def pool() -> DevicePool:
    return DevicePool(MADE, ROW)


def written(pool: DevicePool, rows: int, row_sum: int = 7) -> Slice:
    piece = pool.allocate(rows)
    assert piece is not None
    piece.commit(row_sum)
    return piece


def test_the_longest_unused_gives_way_and_what_is_read_does_not(pool: DevicePool) -> None:
    old, middle, new = (written(pool, 2) for _ in range(3))
    pool.pin(old)
    pool.unpin(old)
    pool.pin(new)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is not None
    assert (old.kept, middle.kept, new.kept) == (True, False, True)
    pool.unpin(new)
    pool.check_integrity()


def test_where_readers_leave_too_little_room_nothing_is_evicted(pool: DevicePool) -> None:
    idle, held = written(pool, 2), written(pool, 4)
    pool.pin(held)
    assert pool.allocate(5) is None
    assert idle.kept
    assert pool.allocate(9) is None


def test_where_readers_leave_no_gap_that_is_large_enough_nothing_is_evicted(pool: DevicePool) -> None:
    first, held, last = written(pool, 3), written(pool, 2), written(pool, 3)
    pool.pin(held)
    assert pool.allocate(4) is None
    assert first.kept
    assert last.kept
    assert pool.allocate(3) is not None
    assert not first.kept


def test_a_slice_that_was_not_written_is_free_at_once(pool: DevicePool) -> None:
    piece = pool.allocate(8)
    assert piece is not None
    assert pool.allocate(1) is None
    piece.abandon()
    assert pool.used == 0
    pool.check_idle()


def test_a_slice_whose_item_is_gone_is_free_when_its_reader_is(pool: DevicePool) -> None:
    piece = written(pool, 8)
    pool.pin(piece)
    piece.drop()
    assert not piece.kept
    assert pool.allocate(1) is None
    pool.unpin(piece)
    assert pool.used == 0
    piece.drop()
    pool.check_idle()


def test_a_worker_s_death_ends_its_pool_and_is_told_of_once() -> None:
    told: list[DevicePool] = []
    pools = DevicePools(ROW, told.append)
    first, second = pools.open(MADE), pools.open(MADE)
    assert first is not None
    assert second is not None
    assert first.name != second.name
    read, writing = written(first, 2), first.allocate(2)
    assert writing is not None
    first.pin(read)
    pools.lose(first)
    pools.lose(first)
    pools.lose(None)
    assert (told, pools.alive) == ([first], [second])
    assert not read.kept
    assert first.allocate(1) is None
    first.unpin(read)
    writing.abandon()
    first.check_idle()


def test_a_worker_without_a_pool_has_none() -> None:
    pools = DevicePools(ROW)
    assert pools.open(None) is None
    assert pools.alive == []


class Machine(RuleBasedStateMachine):
    """Whatever is done, in whatever order: slices never overlap, and nothing that is pinned loses its bytes."""

    writing, kept = Bundle("writing"), Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.pool = DevicePool(PoolMade("GPU-0", b"", 32 * ROW), ROW)
        self.readers: list[Slice] = []
        self.places: dict[Slice, tuple[int, int]] = {}

    @rule(target=writing, rows=st.integers(1, 12))
    def allocate(self, rows: int) -> Slice | None:
        used = self.pool.used
        piece = self.pool.allocate(rows)
        assert piece is not None or self.pool.used == used, "something was evicted in vain"
        return piece

    @rule(target=kept, piece=writing)
    def commit(self, piece: Slice | None) -> Slice | None:
        if piece is not None and piece.pins and not piece.kept and piece not in self.readers:
            piece.commit(1)
        return piece

    @rule(piece=kept)
    def read(self, piece: Slice | None) -> None:
        if piece is not None and piece.kept:
            self.pool.pin(piece)
            self.readers.append(piece)

    @rule()
    def leave(self) -> None:
        if self.readers:
            self.pool.unpin(self.readers.pop())

    @rule(piece=kept)
    def drop(self, piece: Slice | None) -> None:
        if piece is not None and (piece.kept or piece in self.readers):
            piece.drop()

    @invariant()
    def holds_together(self) -> None:
        self.pool.check_integrity()
        spans = sorted((piece.span.offset, piece.span.end) for piece in set(self.readers))
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
        assert all(piece.pins for piece in self.readers)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_accounts_hold_together = Machine.TestCase
