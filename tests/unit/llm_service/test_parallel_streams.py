"""Rows of one item over several connections at once: who brings which stretch, and what comes of one that breaks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from common.media.item import Options
from llm_service.encoders.item_identity import identify
from tests.unit.llm_service.scripted import (
    DIGEST,
    LAYOUT,
    ROWS,
    Call,
    ScriptedEncoder,
    bench,
    content,
    eventually,
    is_full,
    request,
    settled,
    well,
)

DATA = b"picture"
STRETCHES = [(0, 4), (4, 8), (8, 12)]


BY_PARTS = {"connections": 3, "part_bytes": 4 * LAYOUT.row_bytes}
"""Four rows are worth a stream of their own."""


@dataclass
class Gates:
    """An encoder that brings a stretch of its only item when the gate of its first row is open. What asks for a whole
    item gets its header, and no row."""

    asked: list[tuple[int, int]] = field(default_factory=list)
    connections: set[str] = field(default_factory=set)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    breaks: set[int] = field(default_factory=set)
    says: dict[str, Any] = field(default_factory=dict)

    def gate(self, first: int) -> asyncio.Event:
        return self.gates.setdefault(first, asyncio.Event())

    async def __call__(self, call: Call) -> None:
        call.data = DATA
        await call.header(**self.says)
        if not call.request.end_rows:
            await asyncio.Event().wait()
        first, end = (call.request.first_rows or [0])[0], call.request.end_rows[0]
        self.asked.append((first, end))
        self.connections.add(call.context.peer())
        await self.gate(first).wait()
        await call.rows(first, 1)
        if first in self.breaks:
            self.breaks.discard(first)
            await call.breaks()
        for row in range(first + 1, end):
            await call.rows(row, 1)
        await call.done()

    def open(self, *firsts: int) -> None:
        for first in firsts:
            self.gate(first).set()


async def test_stretches_come_over_connections_of_their_own_and_count_when_there_is_no_gap_before_them() -> None:
    gates = Gates()
    async with bench(encoder := ScriptedEncoder([gates]), **BY_PARTS) as b:
        await b.usable(1)
        (entry,) = await b.land(DATA)
        await eventually(lambda: sorted(gates.asked) == STRETCHES)
        assert len(gates.connections) == 3
        await eventually(lambda: encoder.open == 3)  # the stream that brought the header has been let go
        gates.open(8)
        await eventually(lambda: encoder.open == 2)
        assert entry.landed == 0
        gates.open(0)
        await eventually(lambda: entry.landed == 4)
        gates.open(4)
        await settled(entry)
        assert bytes(b.cache.buffer.slice(entry.place)) == content(DATA)
        assert b.cache.counters.received == ROWS
        b.cache.release(entry)


async def test_a_part_that_breaks_is_no_end_and_rows_before_it_are_kept() -> None:
    gates = Gates(breaks={0})
    async with bench(ScriptedEncoder([gates]), **BY_PARTS) as b:
        await b.usable(1)
        (entry,) = await b.land(DATA)
        await eventually(lambda: len(gates.asked) == 3)
        gates.open(0)
        await eventually(lambda: len(gates.asked) == 5)
        assert sorted(gates.asked[3:]) == [(1, 6), (6, 12)], "eleven rows are left: two parts"
        gates.open(1, 6)
        await settled(entry)
        assert bytes(b.cache.buffer.slice(entry.place)) == content(DATA)
        assert (b.receiver.counters.retries, b.cache.counters.received) == (1, ROWS)
        b.cache.release(entry)


async def test_where_no_part_can_be_had_the_first_stream_brings_all_rows() -> None:
    async def whole_alone(call: Call) -> None:
        await (well(call) if call.data else is_full(call))

    async with bench(encoder := ScriptedEncoder([whole_alone]), **BY_PARTS) as b:
        await b.usable(1)
        assert await b.whole(DATA) == content(DATA)
        assert len([call for call in encoder.calls if call.data]) == 1
        assert not b.pool.replicas[0].full


async def test_parts_ask_by_the_key_alone_which_stands_for_options_and_type() -> None:
    async with bench(encoder := ScriptedEncoder([gates := Gates()]), **BY_PARTS) as b:
        await b.usable(1)
        gates.open(*(first for first, _ in STRETCHES))
        wanted = request(DATA)
        item = replace(wanted.media[0], options=Options(max_pixels=400), mime_type="image/png")
        gates.says["key"] = (await identify(item, DIGEST, wanted.salt)).key
        assert await b.whole_of(replace(wanted, media=(item,))) == content(DATA)
        whole, *parts = [call.request.items[0] for call in encoder.calls]
        assert (whole.options.max_pixels, whole.mime_type) == (400, "image/png")
        assert len(parts) == 3
        assert not any(part.HasField("options") or part.mime_type for part in parts)


async def test_a_stream_goes_on_at_an_encoder_that_has_left_the_list_though_no_part_can_be_opened() -> None:
    told = asyncio.Event()

    async def late(call: Call) -> None:
        await call.header()
        await told.wait()
        await call.rows(0, ROWS)
        await call.done()

    async with bench(ScriptedEncoder([late]), **BY_PARTS) as b:
        await b.usable(1)
        fetches = await b.receiver.fetch_headers(request(DATA))
        b.pool.replica_set.forget(b.pool.replicas[0].address)
        await eventually(lambda: not b.pool.replicas)
        (entry,) = await b.receiver.acquire(fetches)
        told.set()
        await settled(entry)
        assert bytes(b.cache.buffer.slice(entry.place)) == content(DATA)
        b.cache.release(entry)


async def test_who_leaves_while_parts_are_open_leaves_none_behind() -> None:
    gates = Gates()
    async with bench(encoder := ScriptedEncoder([gates]), **BY_PARTS) as b:
        await b.usable(1)
        (entry,) = await b.land(DATA)
        await eventually(lambda: len(gates.asked) == 3)
        b.cache.release(entry)
        await eventually(lambda: encoder.open == 0)


async def test_few_rows_come_by_one_stream_however_many_connections_there_are() -> None:
    async with bench(encoder := ScriptedEncoder(), connections=3, part_bytes=ROWS * LAYOUT.row_bytes) as b:
        await b.usable(1)
        assert await b.whole(DATA) == content(DATA)
        assert len(encoder.calls) == 1
