"""Rows by NIXL from an encoder's store to where they land: both ends of the link, with an agent each."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest

from common.errors import DataLoss, Precondition, Unavailable
from common.media.item import Grid, Header, Modality
from common.nixl.agent import NixlAgent
from common.rows.wire import DType, RowLayout, crc32c
from common.shm.arena import SharedBuffer
from encoder_service import convert
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from encoder_service.transports.base import RowRun
from encoder_service.transports.transports import Transports
from llm_service.encoders.transports import copier
from llm_service.encoders.transports.base import ArrivedRows
from llm_service.encoders.transports.nixl import Nixl
from llm_service.encoders.transports.nixl_reader import PART_BYTES, NixlReader
from tests.launch import stop
from tests.nixl_agents import TWIN
from tests.waiting import eventually
from twinlens.v1 import encoder_pb2

NIXL, INLINE = encoder_pb2.TRANSPORT_NIXL, encoder_pb2.TRANSPORT_INLINE
LAYOUT = RowLayout(levels=2, width=64, dtype=DType.FLOAT32)
ROWS = 20_001  # 9.8 MiB, which are three parts
SIZE = ROWS * LAYOUT.row_bytes


@dataclass
class Bench:
    """An entry of a store, the encoder's transports over it, and what reads it."""

    store: EmbeddingStore
    entry: Entry
    transports: Transports
    agent: NixlAgent
    reader: NixlReader
    released: list[str] = field(default_factory=list)
    target: bytearray = field(default_factory=lambda: bytearray(SIZE))

    def __post_init__(self) -> None:
        self.nixl = Nixl("an-encoder:7001", self.reader, self._release)

    def _release(self, lease: str) -> asyncio.Future[bool | None]:
        self.released.append(lease)
        held: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        held.set_result(self.transports.release([lease]) > 0)
        return held

    @property
    def data(self) -> bytes:
        return bytes(self.store.buffer.slice(self.entry.span))

    async def heard(self, backend: str = "", *, waits: bool = True) -> None:
        """It `waits` until the agents are connected, be it longer than the moment that a question to an encoder has."""
        told = convert.write_nixl_agent(self.transports.nixl_memory)
        if told is not None and backend:
            told.backend = backend
        await self.nixl.on_info(encoder_pb2.EncoderServiceGetInfoResponse(nixl_agent=told))
        if waits and self.nixl._connecting is not None:
            await asyncio.wait({self.nixl._connecting})

    @property
    def host(self) -> encoder_pb2.HostProof:
        proof = encoder_pb2.HostProof()
        self.nixl.prove(proof)
        return proof

    def run(self, first: int = 0) -> RowRun:
        return RowRun(0, self.entry.allocation, first, ROWS)

    async def read(self, first: int = 0, **changes: Any) -> list[int]:
        """Reads rows as a stream's reader does, by a handle with these changes; the sizes of the pieces."""
        pieces: list[int] = []
        stream = self.transports.choose([NIXL], self.host, self.run(first)).send(self.run(first), self.host)
        async with aclosing(stream):
            async for message in stream:
                assert isinstance(message, encoder_pb2.EncodeRows)
                handle = message.handle
                for name, value in changes.items():
                    if name == "part_crc32c":
                        del handle.part_crc32c[:]
                        handle.part_crc32c.extend(value)
                    else:
                        setattr(handle, name, value)
                run = ArrivedRows(message.first_row, message.count, handle)
                assert self.nixl.takes(run)
                place = memoryview(self.target)[message.first_row * LAYOUT.row_bytes :]
                async with aclosing(self.nixl.receive(run, place)) as found:
                    pieces += [piece async for piece in found]
        return pieces


@asynccontextmanager
async def bench(backend: str = "UCX", *, places: int = 4, lease_seconds: float = 60.0) -> AsyncIterator[Bench]:
    buffer = SharedBuffer.create("test", 16 << 20)
    store = EmbeddingStore(buffer, LAYOUT.row_bytes, registered=True)
    allocation = await store.allocate(ROWS)
    buffer.slice(allocation.span)[:] = np.random.default_rng(0).standard_normal(SIZE // 4, np.float32).tobytes()
    entry = store.commit(allocation, Header(b"k" * 32, Modality.IMAGE, Grid(1, 128, 128), ROWS), "")
    agent = NixlAgent(buffer, backend, longest_pause=0.05, module=TWIN)
    reader = NixlReader(backend, places * PART_BYTES, LAYOUT.dtype, module=TWIN)
    try:
        await agent.start()
        await reader.start()
        given: dict[str, Any] = {"shared_memory": False, "folder": "", "lease_seconds": lease_seconds}
        async with Transports.open(store, LAYOUT, **given, nixl=agent) as transports:
            made = Bench(store, entry, transports, agent, reader)
            await made.heard()
            yield made
            assert transports.leases == 0, "a lease is left"
            await eventually(lambda: reader.free == reader.places, "every place is free")
    finally:
        await reader.stop()
        await agent.stop()
    store.unpin(entry.allocation)
    store.check_idle()
    buffer.close()


@pytest.mark.parametrize("places", [1, 2, 4])
async def test_rows_land_as_they_are_in_the_store_part_by_part(places: int) -> None:
    async with bench(places=places) as b:
        assert b.nixl.usable
        assert b.transports.numbers == [NIXL, INLINE]
        first = 10 * LAYOUT.row_bytes
        assert await b.read(10) == [PART_BYTES, PART_BYTES, SIZE - first - 2 * PART_BYTES]
        assert bytes(b.target) == bytes(first) + b.data[first:]
        assert len(b.released) == 1
        assert b.transports.sent.rows == {NIXL: ROWS - 10}


@pytest.mark.parametrize("backend", ["SPOILS", "FAILS", "DIES"])
async def test_what_comes_damaged_or_not_at_all_counts_nowhere_and_the_lease_comes_back(backend: str) -> None:
    async with bench(backend) as b:
        with pytest.raises(DataLoss):
            await b.read()
        assert bytes(b.target) == bytes(SIZE)
        assert len(b.released) == 1
        assert not b.nixl.usable


async def test_after_a_failure_rows_come_otherwise_until_a_pause_is_over() -> None:
    async with bench("FAILS") as b:
        for _ in range(2):
            with pytest.raises(DataLoss):
                await b.read()
            assert not b.nixl.usable
            b.nixl._again = 0.0  # it is over
            await b.heard()
            assert b.nixl.usable
        assert b.nixl._pause == 2.0


async def test_the_next_agent_of_an_encoder_is_not_asked_sooner_than_the_one_that_failed() -> None:
    async with bench("FAILS") as b:
        before, child = b.transports.nixl_memory, b.agent._child
        assert child is not None
        with pytest.raises(DataLoss):
            await b.read()
        b.nixl._again = float("inf")  # however long another agent takes to start
        child.kill()
        await eventually(lambda: b.transports.nixl_memory not in (None, before), "there is another agent")
        await b.heard()
        assert (b.nixl.usable, b.nixl._pause) == (False, 1.0)


async def test_an_agent_that_ours_has_forgotten_is_told_to_it_anew() -> None:
    """As the library forgets it when a connection breaks, be it for a moment."""
    async with bench("FORGETS") as b:
        with pytest.raises(DataLoss):
            await b.read()
        b.nixl._again = 0.0
        await b.heard()
        await b.read()
        assert bytes(b.target) == b.data


async def test_a_reader_who_leaves_leaves_places_that_are_still_written_to_alone() -> None:
    """With a place for each part, and reads that do not end."""
    async with bench(places=3) as b:
        child = b.reader.agent._child
        assert child is not None
        stop(child.process.pid)
        reading = asyncio.create_task(b.read())
        await eventually(lambda: b.reader.free == 0, "all parts are read")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert b.reader.free == 0
        assert len(b.released) == 1
        os.kill(child.process.pid, signal.SIGCONT)
        await eventually(lambda: b.reader.free == 3, "the reads have ended")
        assert bytes(b.target) == bytes(SIZE)
        await b.read()
        assert bytes(b.target) == b.data


async def test_a_reader_who_is_cancelled_after_a_failure_leaves_when_copies_have_ended_and_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they write others' rows may lie next; and a lease that nobody gives back pins rows for its whole time."""
    begun, goes_on, calls = threading.Event(), threading.Event(), count()

    def checked(data: memoryview) -> int:
        if next(calls) == 0:
            assert begun.wait(180)
            return 0
        begun.set()
        assert goes_on.wait(180)
        return crc32c(data)

    monkeypatch.setattr(copier, "_THREADS", 2)
    monkeypatch.setattr(copier, "crc32c", checked)
    async with bench() as b:
        reading = asyncio.create_task(b.read())
        await eventually(lambda: not b.nixl.usable, "a part has failed")
        for _ in range(2):
            for _ in range(5):
                await asyncio.sleep(0)
            reading.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        left = reading.done()
        goes_on.set()
        await asyncio.gather(reading, return_exceptions=True)
        assert not left
        assert len(b.released) == 1


async def test_rows_that_are_written_over_after_their_lease_are_never_taken() -> None:
    async with bench(lease_seconds=0.05) as b:
        stream = b.transports.choose([NIXL], b.host, b.run()).send(b.run(), b.host)
        message = await anext(stream)
        assert isinstance(message, encoder_pb2.EncodeRows)
        await eventually(lambda: b.transports.leases == 0, "the lease ends")
        b.store.buffer.slice(b.entry.span)[-4:] = b"\0\0\0\0"
        run = ArrivedRows(message.first_row, message.count, message.handle)
        pieces = b.nixl.receive(run, memoryview(b.target))
        assert [await anext(pieces), await anext(pieces)] == [PART_BYTES, PART_BYTES]
        for late in (pieces, stream):
            with pytest.raises(Unavailable) as error:
                await anext(late)
            assert error.value.reason == "LEASE_EXPIRED"
        assert (len(b.released), b.nixl.usable) == (1, True), "nothing is wrong with the link"


async def test_numbers_that_are_not_finite_are_refused() -> None:
    async with bench() as b:
        b.store.buffer.slice(b.entry.span)[-4:] = np.float32("nan").tobytes()
        with pytest.raises(DataLoss, match="not finite"):
            await b.read()
        assert len(b.released) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -1},
        {"offset": 16 << 20},
        {"length": SIZE - 512},
        {"length": -1},
        {"part_bytes": 0},
        {"part_bytes": -1},
        {"part_bytes": PART_BYTES + 1},
        {"part_bytes": 1},
        {"part_crc32c": []},
        {"part_crc32c": [0, 0]},
        {"part_crc32c": [0, 0, 0, 0]},
    ],
)
async def test_a_handle_that_contradicts_itself_is_refused_and_nothing_is_read(changes: dict[str, Any]) -> None:
    async with bench() as b:
        with pytest.raises(DataLoss, match="wrong size"):
            await b.read(**changes)
        assert b.reader.free == b.reader.places
        assert b.nixl.usable


async def test_who_is_not_connected_with_the_agent_that_there_is_gets_rows_inline() -> None:
    async with bench() as b:
        stranger = encoder_pb2.HostProof(nixl_agent="another")
        b.transports.check([NIXL, INLINE], stranger)
        assert b.transports.choose([NIXL, INLINE], stranger, b.run()).number == INLINE
        with pytest.raises(Precondition):
            b.transports.check([NIXL], stranger)
        afar = b.host
        afar.boot_id = "another"
        assert b.transports.choose([NIXL, INLINE], afar, b.run()).number == NIXL


async def test_an_encoder_s_next_agent_is_found_and_the_one_before_is_let_go() -> None:
    async with bench() as b:
        before = b.transports.nixl_memory
        child = b.agent._child
        assert before is not None
        assert child is not None
        child.kill()
        await eventually(lambda: b.transports.nixl_memory not in (None, before), "there is another agent")
        assert b.transports.choose([NIXL, INLINE], b.host, b.run()).number == INLINE
        await b.heard()
        assert b.nixl.usable
        assert not b.reader.agent.is_connected(before.agent)
        await b.read()
        assert bytes(b.target) == b.data


async def test_our_own_next_agent_is_connected_anew() -> None:
    async with bench() as b:
        child = b.reader.agent._child
        assert child is not None
        child.kill()
        await eventually(lambda: not b.nixl.usable, "nothing is connected")
        await eventually(lambda: b.reader.agent.memory is not None, "there is another agent")
        await b.heard()
        await b.read()
        assert bytes(b.target) == b.data


async def test_who_hears_of_an_encoder_waits_for_no_agent_that_stands_still() -> None:
    async with bench() as b:
        b.nixl.close()
        child = b.reader.agent._child
        assert child is not None
        stop(child.process.pid)
        await b.heard(waits=False)
        assert not b.nixl.usable
        os.kill(child.process.pid, signal.SIGCONT)
        await eventually(lambda: b.nixl.usable, "they are connected")
        await b.read()
        assert bytes(b.target) == b.data


async def test_an_encoder_with_another_back_end_or_none_is_not_read() -> None:
    async with bench() as b:
        b.nixl.close()
        assert not b.nixl.usable
        await b.heard(backend="LIBFABRIC")
        assert not b.nixl.usable
        assert b.host == encoder_pb2.HostProof()
        await b.nixl.on_info(encoder_pb2.EncoderServiceGetInfoResponse())
        assert not b.nixl.usable
        b.nixl.close()
        await b.heard()
        assert b.nixl.usable


async def test_memory_that_an_agent_has_registered_is_not_given_back_to_the_system() -> None:
    """A network card goes on reading the pages that it knows."""
    async with bench() as b:
        b.store.buffer.view[-4096:] = b"\1" * 4096
        await b.store.shrink()
        assert bytes(b.store.buffer.view[-4096:]) == b"\1" * 4096
