"""Delivery of a video's rows by each transport: runs leave as they land, and what is held for a reader comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from common.media.item import Modality
from common.rows.frames import RowsFrame, unpack
from common.shm import local_link
from common.shm.arena import Range
from common.telemetry import tracing
from encoder_service import convert
from encoder_service.delivery import Delivery, Event
from encoder_service.engine import pipeline
from encoder_service.engine.encode import EncoderEngine
from encoder_service.transports.transports import Transports
from encoder_service.worker.messages import BatchFailed
from llm_service.encoders.transports.base import ArrivedRows
from llm_service.encoders.transports.inline import Inline
from llm_service.encoders.transports.shared_memory import SharedMemory
from tests.unit.encoder_service.engines import LAYOUT, encoder
from tests.unit.encoder_service.fakes import DONE, FakeChild, turns
from twinlens.v1 import encoder_pb2, media_pb2

GROUPS = 4
CLIP = media_pb2.Media(
    modality=media_pb2.MODALITY_VIDEO,
    pixels=media_pb2.PixelBlock(data=bytes(2 * GROUPS * 56 * 56 * 3), frames=2 * GROUPS, height=56, width=56),
)
TOKENS = GROUPS * 4


class NoMeters:
    def served(self, timings: object) -> None: ...
    def failed(self, reason: str) -> None: ...


@dataclass
class Bench:
    """An encoder whose worker answers when it is told to, one frame group at a time, and a caller of it."""

    made: EncoderEngine
    worker: FakeChild
    transports: Transports
    reader: SharedMemory | Inline
    host: encoder_pb2.HostProof
    computed: int = 0

    def events(self) -> AsyncGenerator[Event, None]:
        """The stream of the clip, by the way that is tested alone."""
        return self.asked(CLIP)

    def asked(self, media: media_pb2.Media) -> AsyncGenerator[Event, None]:
        """The stream of any item."""
        request = encoder_pb2.EncodeRequest(accepts=[self.reader.number], host=self.host)
        (item,) = convert.read_items([media], "", 0, tuple(Modality))
        return one_by_one(Delivery(self.made, self.transports, NoMeters(), request, 0, item))  # type: ignore[arg-type]

    async def compute(self) -> None:
        """The worker computes the next frame group: rows that hold its number."""
        await until(lambda: len(self.worker.batches) > self.computed)
        (piece,) = self.worker.batches[self.computed].pieces
        self.computed += 1
        span = Range(piece.rows, piece.tokens * LAYOUT.row_bytes)
        np.frombuffer(self.made.pipeline.store.buffer.slice(span), "<f4")[:] = self.computed
        self.worker.say(DONE)

    async def finish(self) -> None:
        """The worker computes whatever it is still given."""
        while self.computed < len(self.worker.batches) or self.made.pipeline.dispatcher.running:
            await self.compute()
            await turns(20)

    async def computed_run(self, events: AsyncGenerator[Event, None]) -> ArrivedRows:
        """The next run of rows of a stream, for which the worker computes the next frame group."""
        coming = asyncio.create_task(self.run(events))
        await turns(10)
        assert not coming.done(), "rows that nobody has computed"
        await self.compute()
        return await coming

    async def run(self, events: AsyncGenerator[Event, None]) -> ArrivedRows:
        """The next run of rows of a stream."""
        async for event in events:
            if isinstance(event, bytes):
                frame = unpack(event)
                assert isinstance(frame, RowsFrame)
                return ArrivedRows(frame.first, frame.count, frame)
            if event.HasField("rows"):
                return ArrivedRows(event.rows.first_row, event.rows.count, event.rows.handle)
        raise AssertionError("the stream ended")

    async def read(self, run: ArrivedRows) -> bytes:
        target = bytearray(run.count * LAYOUT.row_bytes)
        assert sum([piece async for piece in self.reader.receive(run, memoryview(target))]) == len(target)
        return bytes(target)


async def one_by_one(delivery: Delivery) -> AsyncGenerator[Event, None]:
    """The events of an item, which goes on once its reader wants the next."""
    sent, wanted = asyncio.Queue[Event | None](), asyncio.Semaphore(0)

    async def send(event: Event) -> None:
        sent.put_nowait(event)
        await wanted.acquire()

    running = asyncio.create_task(delivery.run(send))
    running.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (event := await sent.get()) is not None:
            yield event
            wanted.release()
        running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(holds) -> None:
    async with asyncio.timeout(180):
        while not holds():
            await turns(1)


def rows_of(*groups: int) -> bytes:
    """What the rows of these frame groups hold."""
    return b"".join(np.full(4 * LAYOUT.row_bytes // 4, group, "<f4").tobytes() for group in groups)


@pytest.fixture(params=["inline", "shared memory"])
async def bench(request, monkeypatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(pipeline, "cut", lambda grid, *_: [(group, group + 1) for group in range(grid.t)])
    async with opened(monkeypatch, shared=request.param == "shared memory") as each:
        yield each


@asynccontextmanager
async def opened(monkeypatch, *, shared: bool) -> AsyncIterator[Bench]:
    async with encoder(monkeypatch, answers=None, staging=1 << 18, max_units=1) as (made, worker):
        opening = Transports.open(made.pipeline.store, LAYOUT, shared_memory=True, folder="", lease_seconds=60)
        async with opening as transports:
            host, reader = encoder_pb2.HostProof(), Inline(LAYOUT.dtype)
            if shared:
                monkeypatch.setattr(local_link, "_GREETING_SECONDS", 180.0)  # this process may stand still
                reader = SharedMemory("", "", LAYOUT.dtype, lambda: None)
                await reader.on_info(encoder_pb2.EncoderServiceGetInfoResponse(local_socket=transports.local_socket))
                assert reader.usable
            reader.prove(host)
            yield Bench(made, worker, transports, reader, host)
            reader.close()
            await until(lambda: transports.leases == 0)


async def test_rows_cross_before_the_last_group_is_computed(bench: Bench) -> None:
    async with aclosing(bench.events()) as events:
        landed = b""
        for group in range(1, GROUPS + 1):
            run = await bench.computed_run(events)
            assert (run.first, run.count) == (4 * (group - 1), 4)
            landed += await bench.read(run)
            assert len(bench.worker.batches) <= group + 1, "the worker is not ahead of what has crossed"
        assert landed == rows_of(1, 2, 3, 4)
        last = [event async for event in events]
        assert last[-1].HasField("done")
    assert bench.transports.sent.rows == {bench.reader.number: TOKENS}


async def test_what_lands_while_a_run_crosses_is_the_next_run(bench: Bench) -> None:
    async with aclosing(bench.events()) as events:
        first = await bench.computed_run(events)
        await bench.finish()
        landed = await bench.read(first) + await bench.read(await bench.run(events))
        assert landed == rows_of(1, 2, 3, 4)


async def test_a_run_can_be_read_to_its_end_when_the_rest_of_the_item_fails(bench: Bench) -> None:
    """Nobody else is given the bytes meanwhile: what needs the whole store finds no room until the reader is done."""
    store = bench.made.pipeline.store
    async with aclosing(bench.events()) as events:
        run = await bench.computed_run(events)
        await until(lambda: len(bench.worker.batches) > 1)
        bench.worker.say(BatchFailed(why="broken"))
        bench.computed += 1
        await bench.finish()
        other = asyncio.create_task(store.allocate(store.capacity // LAYOUT.row_bytes))
        await turns(10)
        assert not other.done()
        assert await bench.read(run) == rows_of(1)
        last = [event async for event in events]
        assert last[-1].HasField("error")
        store.abandon(await other)


async def test_a_reader_who_is_behind_when_the_rest_fails_hears_why(bench: Bench) -> None:
    """More rows had landed behind the run that it was reading; what it is told is not that those are gone."""
    async with aclosing(bench.events()) as events:
        run = await bench.computed_run(events)
        await bench.compute()
        await until(lambda: len(bench.worker.batches) > 2)
        bench.worker.say(BatchFailed(why="broken"))
        bench.computed += 1
        await bench.finish()
        assert await bench.read(run) == rows_of(1)
        last = [event async for event in events]
        assert last[-1].error.status.reason == "ENCODE_FAILED"


async def test_an_item_that_fails_is_an_error_of_its_calls_span(bench: Bench) -> None:
    """What is wrong with it is an event of the stream, and no exception."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing.use(provider)
    try:
        with tracing.serving("Encode", ()):
            (event,) = [event async for event in bench.asked(media_pb2.Media())]
    finally:
        tracing.use(None)
    assert isinstance(event, encoder_pb2.EncodeResponse)
    assert event.error.status.reason == "BAD_MODALITY"
    (call,) = spans.get_finished_spans()
    assert (call.status.status_code.name, call.status.description) == ("ERROR", "BAD_MODALITY")


async def test_a_stream_that_is_closed_between_two_groups_leaves_nothing(bench: Bench) -> None:
    async with aclosing(bench.events()) as events:
        await bench.computed_run(events)
    assert bench.transports.leases == 0
    await bench.finish()  # a worker had begun on it, so it runs to its end


async def test_a_reader_that_dies_in_the_middle_leaves_no_lease(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "cut", lambda grid, *_: [(group, group + 1) for group in range(grid.t)])
    async with opened(monkeypatch, shared=True) as bench, aclosing(bench.events()) as events:
        await bench.computed_run(events)
        assert bench.transports.leases == 1
        bench.reader.close()
        bench.reader = Inline(LAYOUT.dtype)
        following = asyncio.create_task(bench.run(events))
        await until(lambda: bench.transports.leases == 0)
        await bench.finish()
        with pytest.raises(AssertionError, match="the stream ended"):  # the one way that was accepted is closed
            await following
