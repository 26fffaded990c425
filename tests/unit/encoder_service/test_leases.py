"""Leases: what is pinned for a reader, in how many ways a lease ends, and that the board says so first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from common.media.item import Grid, Header, Modality
from common.shm.arena import SharedBuffer
from common.shm.lease_board import LeaseBoard
from encoder_service.engine.embedding_store import Allocation, EmbeddingStore, Entry
from encoder_service.engine.leases import Lease, Leases

ROW = 64


@dataclass
class Bench:
    store: EmbeddingStore
    board: LeaseBoard
    leases: Leases
    entry: Entry

    def stands(self, lease: Lease) -> bool:
        """The lease's number is on the board."""
        return self.board.buffer.view.cast("Q")[lease.slot] == lease.number


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    buffer, board = SharedBuffer.create("test", 16 * ROW), LeaseBoard(2)
    store = EmbeddingStore(buffer, ROW)
    entry = store.commit(await store.allocate(4), Header(b"key", Modality.IMAGE, Grid(1, 2, 8), 4), "")
    store.unpin(entry.allocation)
    leases = Leases(store, board, seconds=60)
    yield Bench(store, board, leases, entry)
    leases.check_idle()
    store.check_idle()
    board.close()
    buffer.close()


async def test_a_leased_entry_is_pinned_and_posted_until_the_block_ends(bench: Bench) -> None:
    with bench.leases.take(bench.entry.allocation, b"reader") as lease:
        assert lease.span == bench.entry.span
        assert bench.entry.pins == 1
        assert bench.stands(lease)
        assert len(bench.leases) == 1
    assert bench.entry.pins == 0
    assert not bench.stands(lease)


async def test_an_error_in_the_block_gives_the_lease_back(bench: Bench) -> None:
    with pytest.raises(RuntimeError), bench.leases.take(bench.entry.allocation, b"reader"):
        raise RuntimeError


async def test_a_reader_releases_by_number_and_a_caller_by_name(bench: Bench) -> None:
    take, allocation = bench.leases.take, bench.entry.allocation
    with take(allocation, b"reader") as first, take(allocation, b"reader") as second:
        bench.leases.release_number(first.number, b"another reader")
        assert not first.ended.is_set()
        bench.leases.release_number(first.number, b"reader")
        assert first.ended.is_set()
        assert not first.expired
        assert bench.entry.pins == 1
        assert bench.leases.release(second.name)
        assert not bench.leases.release(second.name)
        assert not bench.leases.release("unknown")
        assert bench.entry.pins == 0


async def test_a_reader_that_is_gone_keeps_nothing(bench: Bench) -> None:
    with (
        bench.leases.take(bench.entry.allocation, b"gone") as gone,
        bench.leases.take(bench.entry.allocation, b"here") as here,
    ):
        bench.leases.drop(b"gone")
        assert gone.ended.is_set()
        assert not here.ended.is_set()
        assert bench.entry.pins == 1


async def test_a_lease_ends_by_its_time_and_says_so(bench: Bench) -> None:
    short = Leases(bench.store, bench.board, seconds=0.01)
    with short.take(bench.entry.allocation, b"asleep") as lease:
        await asyncio.wait_for(lease.ended.wait(), 180)
        assert lease.expired
        assert not bench.stands(lease)
        assert bench.entry.pins == 0


async def test_the_board_is_cleared_before_anyone_may_write_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stood: list[bool] = []
    unpin = bench.store.unpin

    def watched(allocation: Allocation) -> None:
        stood.append(bench.stands(lease))
        unpin(allocation)

    monkeypatch.setattr(bench.store, "unpin", watched)
    with bench.leases.take(bench.entry.allocation, b"reader") as lease:
        assert stood == []
    assert stood == [False]


async def test_past_the_board_there_is_no_room(bench: Bench) -> None:
    with bench.leases.take(bench.entry.allocation, b"a"), bench.leases.take(bench.entry.allocation, b"b"):
        assert not bench.leases.room
    assert bench.leases.room
