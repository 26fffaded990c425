"""Rows in device pools: to whom they are offered, which runs go that way, and how leases on them end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from common.errors import Exhausted, Precondition, Unavailable
from common.media.item import Grid, Header, Modality
from common.rows.wire import DType, RowLayout
from common.shm.arena import SharedBuffer
from encoder_service.engine.device_pool import DevicePool, DevicePools, Slice
from encoder_service.engine.embedding_store import Allocation, EmbeddingStore
from encoder_service.transports.base import RowRun
from encoder_service.transports.transports import Transports
from encoder_service.worker.messages import PoolMade
from llm_service.encoders.transports.shared_memory import Region
from twinlens.v1 import encoder_pb2

INLINE, SHARED = encoder_pb2.TRANSPORT_INLINE, encoder_pb2.TRANSPORT_SHARED_MEMORY
CUDA = encoder_pb2.TRANSPORT_CUDA_IPC
EVERY = [CUDA, SHARED, INLINE]
LAYOUT = RowLayout(levels=2, width=64, dtype=DType.FLOAT32)
ROWS = 12


@dataclass
class Bench:
    """A store with one allocation of 12 rows, of which three slices are in two pools; a reader may map GPU-0."""

    store: EmbeddingStore
    pools: DevicePools
    allocation: Allocation
    transports: Transports
    region: Region
    host: encoder_pb2.HostProof
    gone: bool = False

    def leave(self) -> None:
        if not self.gone:
            self.region.close()
        self.gone = True

    def run(self, first: int = 0, end: int = ROWS) -> RowRun:
        return RowRun(3, self.allocation, first, end)

    def choose(self, run: RowRun) -> int:
        return self.transports.choose(EVERY, self.host, run).number


def made(uuid: str, rows: int = 64) -> PoolMade:
    return PoolMade(uuid, f"handle of {uuid}".encode(), rows * LAYOUT.row_bytes)


def written(pool: DevicePool | None, rows: int, row_sum: int) -> Slice:
    assert pool is not None
    piece = pool.allocate(rows)
    assert piece is not None
    piece.commit(row_sum)
    return piece


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Bench]:
    buffer = SharedBuffer.create("test", 1 << 16)
    store, pools = EmbeddingStore(buffer, LAYOUT.row_bytes), DevicePools(LAYOUT.row_bytes)
    allocation = await store.allocate(ROWS)
    first, second = pools.open(made("GPU-0")), pools.open(made("GPU-0"))
    for row, pool in ((0, first), (4, second), (8, first)):
        allocation.copies[row] = written(pool, 4, 100 + row)
    given = {"shared_memory": True, "folder": "", "lease_seconds": 60, **options}
    async with Transports.open(store, LAYOUT, pools=pools, **given) as transports:
        socket = transports.local_socket
        assert socket is not None
        region = None
        while region is None:
            with contextlib.suppress(TimeoutError):  # of the greeting: this process stood still
                region = await asyncio.to_thread(Region.open, socket.name, "", socket.secret, LAYOUT.dtype)
        host = encoder_pb2.HostProof(gpu_uuids=["GPU-0"])
        region.prove(host)
        bench = Bench(store, pools, allocation, transports, region, host)
        yield bench
        bench.leave()
    pools.check_idle()
    store.unpin(bench.allocation)
    store.check_idle()
    pools.check_idle()
    buffer.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as made:
        yield made


async def test_a_reader_of_the_same_host_and_device_is_offered_handles_that_cover_the_run(bench: Bench) -> None:
    assert bench.transports.numbers == EVERY
    stream = bench.transports.choose(EVERY, bench.host, bench.run(4)).send(bench.run(4), bench.host)
    messages = [await anext(stream), await anext(stream)]
    copies = [bench.allocation.copies[4], bench.allocation.copies[8]]
    for message, copy, row in zip(messages, copies, (4, 8), strict=True):
        assert isinstance(message, encoder_pb2.EncodeRows)
        handle = message.handle
        assert (message.item, message.first_row, message.count) == (3, row, 4)
        assert (handle.transport, handle.region, handle.ipc_handle) == (CUDA, copy.pool.name, b"handle of GPU-0")
        assert (handle.offset, handle.length) == (copy.span.offset, 4 * LAYOUT.row_bytes)
        assert handle.row_sum == 100 + row
        assert copy.pins == 1
    assert bench.transports.leases == 2
    for message in messages:
        assert bench.transports.release([message.handle.lease]) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert bench.transports.sent.rows == {CUDA: 8}
    assert bench.transports.leases == 0


@pytest.mark.parametrize(
    "host",
    [
        encoder_pb2.HostProof(gpu_uuids=["GPU-0"]),
        encoder_pb2.HostProof(gpu_uuids=["GPU-0"], grant=b"made up" * 2),
    ],
)
async def test_a_device_without_a_shared_host_proves_nothing(bench: Bench, host: encoder_pb2.HostProof) -> None:
    assert bench.transports.choose(EVERY, host, bench.run()).number == INLINE
    with pytest.raises(Precondition):
        bench.transports.check([CUDA], host)


async def test_a_shared_host_without_the_device_gets_shared_memory(bench: Bench) -> None:
    del bench.host.gpu_uuids[:]
    bench.host.gpu_uuids.append("GPU-1")
    assert bench.choose(bench.run()) == SHARED
    bench.transports.check(EVERY, bench.host)
    with pytest.raises(Precondition):
        bench.transports.check([CUDA], bench.host)


async def test_where_leases_are_few_a_run_goes_the_way_that_takes_fewer_or_waits_for_its_turn() -> None:
    async with opened(slots=2) as bench:
        bench.transports.check([CUDA], bench.host)
        assert bench.choose(bench.run(0, 8)) == CUDA
        assert bench.choose(bench.run()) == SHARED, "it has three slices"
        with pytest.raises(Exhausted) as full:
            bench.transports.choose([CUDA], bench.host, bench.run())
        assert full.value.reason == "LEASES_FULL"


async def test_runs_that_are_not_whole_slices_or_have_given_way_go_another_way(bench: Bench) -> None:
    bench.transports.check([CUDA], bench.host)
    assert [bench.choose(bench.run(*each)) for each in ((0, 4), (4, 12), (8, 12))] == [CUDA] * 3
    assert [bench.choose(bench.run(*each)) for each in ((2, 12), (0, 6), (1, 2))] == [SHARED] * 3
    bench.allocation.copies[4].drop()
    assert [bench.choose(bench.run(*each)) for each in ((0, 4), (4, 8), (0, 12))] == [CUDA, SHARED, SHARED]
    with pytest.raises(Precondition) as never:  # no reader who lets go brings them back
        bench.transports.choose([CUDA], bench.host, bench.run())
    assert never.value.reason == "NO_COMMON_TRANSPORT"


async def test_a_worker_s_death_ends_the_leases_on_its_pool_alone_and_the_stream_with_them(bench: Bench) -> None:
    stream = bench.transports.choose(EVERY, bench.host, bench.run(0, 8)).send(bench.run(0, 8), bench.host)
    first, second = await anext(stream), await anext(stream)
    lost, kept = bench.allocation.copies[4], bench.allocation.copies[0]
    bench.pools.lose(lost.pool)
    assert bench.transports.leases == 1
    assert (lost.pins, kept.pins) == (0, 1)
    assert bench.choose(bench.run(0, 8)) == SHARED
    assert [pool.name for pool in bench.transports.pools] == [first.handle.region]
    bench.transports.release([first.handle.lease])
    with pytest.raises(Unavailable) as error:
        await anext(stream)
    assert error.value.reason == "POOL_LOST"
    assert bench.transports.release([second.handle.lease]) == 0


async def test_a_lease_ends_by_its_time() -> None:
    async with opened(lease_seconds=0.05) as bench:
        stream = bench.transports.choose([CUDA], bench.host, bench.run()).send(bench.run(), bench.host)
        for _ in range(3):
            await anext(stream)
        with pytest.raises(Unavailable) as error:
            await asyncio.wait_for(anext(stream), 180)
        assert error.value.reason == "LEASE_EXPIRED"
        assert bench.transports.leases == 0


async def test_a_reader_that_is_gone_keeps_nothing(bench: Bench) -> None:
    stream = bench.transports.choose([CUDA], bench.host, bench.run()).send(bench.run(), bench.host)
    for _ in range(3):
        await anext(stream)
    assert bench.transports.leases == 3
    bench.leave()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 180)
    assert bench.transports.leases == 0
    assert bench.transports.choose(EVERY, bench.host, bench.run()).number == INLINE


async def test_a_stream_that_is_closed_gives_all_of_its_leases_back(bench: Bench) -> None:
    stream = bench.transports.choose([CUDA], bench.host, bench.run()).send(bench.run(), bench.host)
    await anext(stream)
    assert bench.transports.leases == 3
    await stream.aclose()
    assert bench.transports.leases == 0


async def test_slices_live_until_their_reader_is_done_and_no_longer_than_their_item(bench: Bench) -> None:
    entry = bench.store.commit(bench.allocation, Header(b"k" * 32, Modality.IMAGE, Grid(1, 4, 12), ROWS), "")
    stream = bench.transports.choose([CUDA], bench.host, bench.run(0, 4)).send(bench.run(0, 4), bench.host)
    await anext(stream)
    bench.store.unpin(entry.allocation)
    assert sum(entries for entries, _ in bench.store.flush_in_parts()) == 1
    assert sum(pool.used for pool in bench.pools.alive) == 4 * LAYOUT.row_bytes
    await stream.aclose()
    assert sum(pool.used for pool in bench.pools.alive) == 0
    bench.allocation = await bench.store.allocate(ROWS)
