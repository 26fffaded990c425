"""What a request is told of the time that its media took: all that was spent on them, and nothing that was not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry import tracing
from llm_service.generation.media_rows import MediaRows
from llm_service.request import PromptLayout
from tests.unit.llm_service.scripted import (
    ROWS,
    Bench,
    Call,
    ScriptedEncoder,
    bench,
    eventually,
    request,
    settled,
    well,
)

NO_SPANS = PromptLayout([], [])


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Where this process's spans go."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.stop()


async def introduced(b: Bench) -> MediaRows:
    """The rows of one picture, always under the same request id."""
    return MediaRows(b.receiver, await b.receiver.fetch_headers(request(b"picture")))


async def test_a_repeat_of_the_same_name_is_told_of_no_time_that_it_did_not_take() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        first = await introduced(b)
        await first.take(NO_SPANS, ())
        await eventually(lambda: "landing" in first.stages())
        again = await introduced(b)
        await again.take(NO_SPANS, ())
        assert set(again.stages()) == {"hash"}
        for media in (first, again):
            media.released()


async def test_what_was_spent_before_the_engine_asked_for_rows_is_not_forgotten() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        media = await introduced(b)
        hashed = media.stages()["hash"]
        await media.take(NO_SPANS, {0})
        assert b.receiver.counters.covered == 1
        await media._place()
        await eventually(lambda: "landing" in media.stages())
        assert media.stages()["hash"] == hashed
        assert hashed.seconds > 0
        assert b.receiver.counters.covered == 0
        media.released()


async def test_rows_on_their_way_go_on_where_the_engine_asks_for_those_of_another_item() -> None:
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.header()
        if call.data == b"on its way":
            await go_on.wait()
        await call.rows(0, ROWS)
        await call.done()

    encoder = ScriptedEncoder([waits])
    async with bench(encoder) as b:
        await b.usable(1)
        media = MediaRows(b.receiver, await b.receiver.fetch_headers(request(b"covered", b"on its way")))
        await media.take(NO_SPANS, {0})
        before = media._entries[1]
        await media._place()
        await eventually(lambda: media._entries[0].complete)
        go_on.set()
        await settled(media._entries[1])
        assert media._entries[1] is before
        assert before.error is None
        assert [call.data for call in encoder.calls].count(b"on its way") == 1
        media.released()
        assert b.cache.used_bytes, "both stay as cache"


async def test_landing_is_all_the_time_in_which_rows_were_received_streams_that_broke_included(
    spans: InMemorySpanExporter,
) -> None:
    async def breaks_late(call: Call) -> None:
        await call.header()
        await call.rows(0)
        await asyncio.sleep(0.2)  # what is told must contain it
        await call.breaks()

    async with bench(ScriptedEncoder([breaks_late, well])) as b:
        await b.usable(1)
        media = await introduced(b)
        await media.take(NO_SPANS, ())
        await eventually(lambda: sum(span.name == "landing" for span in spans.get_finished_spans()) == 2)
        ends = [(span.start_time, span.end_time) for span in spans.get_finished_spans() if span.name == "landing"]
        traced = sum(end - start for start, end in ends if start is not None and end is not None) / 1e9
        assert media.stages()["landing"].seconds >= 0.9 * traced, "two clocks may differ a little"
        media.released()


async def test_landing_ends_with_the_last_row_however_long_the_encoder_talks_on() -> None:
    seen = asyncio.Event()

    async def talks_on(call: Call) -> None:
        await call.header()
        await call.rows(0, ROWS)
        await seen.wait()
        await call.done()

    async with bench(ScriptedEncoder([talks_on])) as b:
        await b.usable(1)
        fetches = await b.receiver.fetch_headers(request(b"picture"))
        (entry,) = await b.receiver.acquire(fetches)
        await settled(entry)
        complete = time.perf_counter()
        seen.set()
        await eventually(lambda: "landing" in fetches[0].stages)
        ended = fetches[0].stages["landing"].ended
        assert ended is not None
        assert ended <= complete
        b.cache.release(entry)


async def test_rows_that_are_read_while_another_service_computes_keep_no_room_from_others() -> None:
    async with bench(ScriptedEncoder(), rows=ROWS, header_seconds=0) as b:
        await b.usable(1)
        media = await introduced(b)
        async with media, media.at_encoders():
            await eventually(lambda: b.cache.counters.received == ROWS)
            async with asyncio.timeout(60):
                await b.whole(b"of another request")
