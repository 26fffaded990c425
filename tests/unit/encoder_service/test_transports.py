"""The encoder's transports: which way is offered to whom, and what a local reader gets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.errors import DataLoss, Exhausted, Precondition, Unavailable
from common.media.item import Grid, Header, Modality
from common.rows.frames import RowsFrame, unpack
from common.rows.wire import DType, RowLayout
from common.shm import local_link
from common.shm.arena import SharedBuffer
from common.shm.local_link import SECRET_BYTES
from common.telemetry import rate_limit
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from encoder_service.transports.base import RowRun
from encoder_service.transports.transports import Transports
from llm_service.encoders.transports.base import ArrivedRows
from llm_service.encoders.transports.shared_memory import Region
from tests.clock import turns
from tests.waiting import eventually
from twinlens.v1 import encoder_pb2

INLINE, SHARED = encoder_pb2.TRANSPORT_INLINE, encoder_pb2.TRANSPORT_SHARED_MEMORY
LAYOUT = RowLayout(levels=2, width=64, dtype=DType.FLOAT32)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
ROWS = 4096  # 2 MiB: two inline chunks, and more than is copied on an event loop


class Bench:
    """A store with one entry, and transports over it."""

    def __init__(self, store: EmbeddingStore, entry: Entry, transports: Transports) -> None:
        self.store = store
        self.entry = entry
        self.transports = transports

    def run(self, first: int = 0, end: int = ROWS, item: int = 0) -> RowRun:
        return RowRun(item, self.entry.allocation, first, end)

    @property
    def data(self) -> bytes:
        return bytes(self.store.buffer.slice(self.entry.span))

    def region(self, folder: str = "") -> Region:
        offered = self.transports.local_socket
        assert offered is not None
        return Region.open(offered.name, folder, offered.secret, LAYOUT.dtype)

    async def mapped(self, folder: str = "") -> tuple[Region, encoder_pb2.HostProof]:
        host = encoder_pb2.HostProof()
        while True:
            with contextlib.suppress(TimeoutError):  # of the greeting: this process stood still
                region = await asyncio.to_thread(self.region, folder)
                region.prove(host)
                return region, host


@asynccontextmanager
async def bench(folder: str = "", **options: Any) -> AsyncIterator[Bench]:
    buffer = SharedBuffer.create("test", 8 << 20)
    store = EmbeddingStore(buffer, LAYOUT.row_bytes)
    allocation = await store.allocate(ROWS)
    buffer.slice(allocation.span)[:] = (
        np.random.default_rng(0).standard_normal(allocation.span.size // 4, np.float32).tobytes()
    )
    entry = store.commit(allocation, Header(b"k" * 32, Modality.IMAGE, Grid(1, 128, 128), ROWS), "")
    given = {"shared_memory": True, "folder": folder, "lease_seconds": 60, **options}
    async with Transports.open(store, LAYOUT, **given) as transports:
        yield Bench(store, entry, transports)
    store.unpin(entry.allocation)
    store.check_idle()
    buffer.close()


async def test_inline_chunks_are_the_rows_from_the_first_that_is_wanted() -> None:
    async with bench() as b:
        transport = b.transports.choose([], encoder_pb2.HostProof(), b.run())
        assert transport.number == INLINE
        frames = [unpack(run) async for run in transport.send(b.run(100, item=3), encoder_pb2.HostProof())]
        assert all(isinstance(frame, RowsFrame) and frame.item == 3 for frame in frames)
        assert b"".join(frame.data for frame in frames) == b.data[100 * LAYOUT.row_bytes :]
        assert b.transports.sent.rows == {INLINE: ROWS - 100}


async def test_without_a_proof_rows_come_inline_or_not_at_all() -> None:
    async with bench() as b:
        for host in (encoder_pb2.HostProof(), encoder_pb2.HostProof(grant=b"made up" * 2)):
            assert b.transports.choose([SHARED, INLINE], host, b.run()).number == INLINE
            b.transports.check([SHARED, INLINE], host)
            with pytest.raises(Precondition):
                b.transports.check([SHARED], host)
            with pytest.raises(Precondition):
                b.transports.choose([SHARED], host, b.run())


async def test_where_every_lease_is_in_use_a_reader_takes_rows_inline_or_is_told_to_come_again() -> None:
    """What a caller has proved is not in question: with room it is served as before."""
    async with bench(slots=1) as b:
        region, host = await b.mapped()
        stream = b.transports.choose([SHARED], host, b.run()).send(b.run(), host)
        await anext(stream)
        assert b.transports.choose([SHARED, INLINE], host, b.run()).number == INLINE
        b.transports.check([SHARED], host)
        with pytest.raises(Exhausted) as full:
            b.transports.choose([SHARED], host, b.run())
        assert full.value.reason == "LEASES_FULL"
        assert full.value.retry_after
        with pytest.raises(Precondition):
            b.transports.choose([SHARED], encoder_pb2.HostProof(), b.run())
        await stream.aclose()
        assert b.transports.choose([SHARED], host, b.run()).number == SHARED
        region.close()


async def test_a_boot_id_of_another_host_rules_sharing_out() -> None:
    async with bench() as b:
        region, host = await b.mapped()
        assert b.transports.choose([SHARED, INLINE], host, b.run()).number == SHARED
        host.boot_id = "another"
        assert b.transports.choose([SHARED, INLINE], host, b.run()).number == INLINE
        host.boot_id = BOOT_ID
        assert b.transports.choose([SHARED, INLINE], host, b.run()).number == SHARED
        region.close()


async def read(b: Bench, region: Region, host: encoder_pb2.HostProof, first: int, target: memoryview) -> list[int]:
    """Reads an entry's rows as a stream's reader does; the sizes of the pieces."""
    pieces: list[int] = []
    async for message in b.transports.choose([SHARED], host, b.run(first)).send(b.run(first), host):
        assert isinstance(message, encoder_pb2.EncodeRows)
        run = ArrivedRows(message.first_row, message.count, message.handle)
        assert region.takes(run)
        pieces += [piece async for piece in region.receive(run, target)]
    return pieces


@pytest.mark.parametrize("kind", ["abstract", "in a folder"])
async def test_a_local_reader_copies_rows_and_the_lease_comes_back(tmp_path: Path, kind: str) -> None:
    folder = "" if kind == "abstract" else str(tmp_path)
    async with bench(folder) as b:
        region, host = await b.mapped(folder)
        target = bytearray((ROWS - 10) * LAYOUT.row_bytes)
        assert sum(await read(b, region, host, 10, memoryview(target))) == len(target)
        assert bytes(target) == b.data[10 * LAYOUT.row_bytes :]
        assert b.transports.leases == 0
        assert b.transports.sent.rows == {SHARED: ROWS - 10}
        region.close()
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240


async def test_rows_that_are_written_over_after_their_lease_are_never_taken() -> None:
    """A reader that sleeps in the middle of its copy for longer than the lease."""
    async with bench(lease_seconds=0.05) as b:
        region, host = await b.mapped()
        stream = b.transports.choose([SHARED], host, b.run()).send(b.run(), host)
        message = await anext(stream)
        run = ArrivedRows(message.first_row, message.count, message.handle)
        await eventually(lambda: b.transports.leases == 0, "the lease ends")
        for written_over in (bytes(b.entry.span.size), b"\xff" * b.entry.span.size):  # by numbers, and by other things
            b.store.buffer.slice(b.entry.span)[:] = written_over
            with pytest.raises(Unavailable) as late:
                await anext(region.receive(run, memoryview(bytearray(run.count * LAYOUT.row_bytes))))
            assert late.value.reason == "LEASE_EXPIRED"
        with pytest.raises(Unavailable) as late:
            await anext(stream)
        assert late.value.reason == "LEASE_EXPIRED"
        region.close()


async def test_a_reader_that_goes_away_gives_its_leases_back_at_once() -> None:
    async with bench() as b:
        region, host = await b.mapped()
        stream = b.transports.choose([SHARED], host, b.run()).send(b.run(), host)
        await anext(stream)
        assert b.transports.leases == 1
        region.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(stream), 180)
        assert b.transports.leases == 0
        with pytest.raises(Precondition):
            b.transports.choose([SHARED], host, b.run())


async def test_who_greets_while_the_encoder_stands_still_is_handed_the_memory() -> None:
    """The greeting is here when the time for it is over."""
    async with bench() as b:
        offered, local = b.transports.local_socket, b.transports._local
        assert offered is not None
        assert local is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(f"\0{offered.name[1:]}")
            await eventually(lambda: local._readers, "it is taken")
            await turns()
            client.sendall(offered.secret)
            time.sleep(1.2)  # noqa: ASYNC251
            client.settimeout(180)
            grant, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, client, 64, 2)
        for descriptor in descriptors:
            os.close(descriptor)
        assert (len(grant), len(descriptors)) == (16, 2)


async def test_a_stream_that_is_closed_gives_its_lease_back() -> None:
    async with bench() as b:
        region, host = await b.mapped()
        stream = b.transports.choose([SHARED], host, b.run()).send(b.run(), host)
        message = await anext(stream)
        await stream.aclose()
        assert b.transports.leases == 0
        run = ArrivedRows(message.first_row, message.count, message.handle)
        with pytest.raises(Unavailable) as late:
            await anext(region.receive(run, memoryview(bytearray(run.count * LAYOUT.row_bytes))))
        assert late.value.reason == "LEASE_EXPIRED"
        region.close()


async def test_a_lease_can_be_released_by_its_name() -> None:
    async with bench() as b:
        region, host = await b.mapped()
        stream = b.transports.choose([SHARED], host, b.run()).send(b.run(), host)
        message = await anext(stream)
        assert b.transports.release(["unknown", message.handle.lease]) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        region.close()


async def test_a_wrong_secret_gets_nothing() -> None:
    async with bench() as b:
        offered = b.transports.local_socket
        assert offered is not None
        with pytest.raises(OSError, match=r"no memory|reset"):
            await asyncio.to_thread(local_link.connect, offered.name, "", b"x" * SECRET_BYTES)


@pytest.mark.parametrize("same_user", [True, False])
async def test_however_many_strangers_come_a_log_has_a_line_a_second_about_them(
    same_user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other users are turned away before they have said anything."""

    def stranger(name: str) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(f"\0{name[1:]}")
            if same_user:
                link.sendall(b"x" * SECRET_BYTES)
            return link.recv(1)

    monkeypatch.setattr(local_link, "same_user", lambda _: same_user)
    monkeypatch.setattr(rate_limit, "time", SimpleNamespace(monotonic=lambda: 7.0))
    async with bench() as b:
        offered = b.transports.local_socket
        assert offered is not None
        with capture_logs() as said:
            for _ in range(5):
                assert not await asyncio.to_thread(stranger, offered.name)
        lines = [each for each in said if each["event"] == "a local reader was refused"]
        assert [each["others"] for each in lines] == [0]


async def test_numbers_that_are_not_finite_are_refused() -> None:
    async with bench() as b:
        region, host = await b.mapped()
        b.store.buffer.slice(b.entry.span)[-4:] = np.float32("nan").tobytes()
        with pytest.raises(DataLoss):
            await read(b, region, host, 0, memoryview(bytearray(ROWS * LAYOUT.row_bytes)))
        region.close()


@pytest.mark.parametrize("change", [{"offset": 8 << 20}, {"offset": -64}, {"length": 64}, {"length": -64}])
async def test_a_handle_that_points_outside_is_refused(change: dict[str, int]) -> None:
    async with bench() as b:
        region, host = await b.mapped()
        stream = b.transports.choose([SHARED], host, b.run()).send(b.run(), host)
        message = await anext(stream)
        handle = encoder_pb2.RowsHandle()
        handle.CopyFrom(message.handle)
        handle.MergeFrom(encoder_pb2.RowsHandle(**change))
        run = ArrivedRows(0, ROWS, handle)
        with pytest.raises(DataLoss):
            await anext(region.receive(run, memoryview(bytearray(ROWS * LAYOUT.row_bytes))))
        await stream.aclose()
        region.close()


async def test_switched_off_there_is_no_socket_and_no_lease() -> None:
    async with bench(shared_memory=False) as b:
        assert b.transports.local_socket is None
        assert b.transports.numbers == [INLINE]
        assert b.transports.release(["x"]) == 0


async def test_an_encoder_that_had_no_descriptor_left_hands_over_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        loop = asyncio.get_running_loop()
        accept, opened, failures = loop.sock_accept, SharedBuffer.open_reader, [2, 0]

        async def crowded(server: socket.socket) -> tuple[socket.socket, object]:
            if failures[0]:
                failures[0] -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return await accept(server)

        def one_at_most(buffer: SharedBuffer) -> int:
            failures[1] += 1
            if failures[1] == 2:
                raise OSError(errno.EMFILE, "too many open files")
            return opened(buffer)

        monkeypatch.setattr(loop, "sock_accept", crowded)
        monkeypatch.setattr(SharedBuffer, "open_reader", one_at_most)
        before = descriptors()
        with pytest.raises(OSError, match=r"no memory|reset"):
            await b.mapped()
        await eventually(lambda: descriptors() <= before, "nothing is left open")
        region, _ = await b.mapped()
        region.close()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_no_descriptor_is_left_open() -> None:
    before = descriptors()
    async with bench() as b:
        for _ in range(3):
            region, _ = await b.mapped()
            region.close()
    await eventually(lambda: descriptors() <= before, "all are closed")
