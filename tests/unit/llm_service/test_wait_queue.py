"""Who waits for room where every encoder is full: in which order they get it, and how often an encoder is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from common.errors import Exhausted
from llm_service.encoders import wait_queue
from llm_service.meters import _media
from tests.unit.llm_service.scripted import (
    ROWS,
    Bench,
    Call,
    ScriptedEncoder,
    bench,
    content,
    eventually,
    request,
    well,
)
from twinlens import v1

ITEMS = 12


@dataclass
class Hall:
    """An encoder with so many seats. Who has one keeps it until `leave`; others hear for how long to stay away."""

    seats: int
    hint: float = 600.0
    seated: list[bytes] = field(default_factory=list)
    held: int = 0
    leave: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def __call__(self, call: Call) -> None:
        if self.held >= self.seats:
            status = v1.Status(code=8, message="full", reason="QUEUE_FULL", retry_after_ms=round(self.hint * 1000))
            await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))
            return
        self.seated.append(call.data)
        self.held += 1
        try:
            await self.leave.acquire()
        finally:
            self.held -= 1
        await well(call)


async def in_order(b: Bench, hall: Hall, count: int) -> list[asyncio.Task[bytes]]:
    """Asks for so many items, each when the one before has its seat or waits."""
    asking: list[asyncio.Task[bytes]] = []
    for number in range(count):
        asking.append(asyncio.create_task(b.whole(b"%d" % number)))
        await eventually(lambda: len(hall.seated) + len(b.pool.wait_queue) == len(asking))
    return asking


async def test_as_one_ends_the_next_begins_in_the_order_in_which_they_came() -> None:
    hall = Hall(2)
    async with bench(encoder := ScriptedEncoder([hall]), rows=ROWS * ITEMS, patience=600) as b:
        await b.usable(1)
        asking = await in_order(b, hall, ITEMS)
        for number in range(2, ITEMS):
            hall.leave.release()
            await eventually(lambda: len(hall.seated) > number)  # noqa: B023
        hall.leave.release()
        hall.leave.release()
        assert await asyncio.gather(*asking) == [content(b"%d" % number) for number in range(ITEMS)]
        assert hall.seated == [b"%d" % number for number in range(ITEMS)]
        assert len(encoder.calls) == ITEMS + 1, "more than one had to hear that there is no room"


async def test_where_others_fill_an_encoder_one_item_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queue, "_PASS_ON_SECONDS", 600.0)  # it says at once that it is full: as soon as it can
    hall = Hall(0, hint=0.1)
    async with bench(encoder := ScriptedEncoder([hall]), rows=ROWS * ITEMS, patience=600) as b:
        await b.usable(1)
        asking = await in_order(b, hall, ITEMS)
        await eventually(lambda: len(encoder.calls) >= 4)
        assert {call.data for call in encoder.calls} == {b"0"}
        refused, hall.seats = len(encoder.calls), ITEMS
        for _ in asking:
            hall.leave.release()
        await asyncio.gather(*asking)
        assert len(encoder.calls) <= refused + ITEMS + 1


async def test_one_whose_header_takes_long_does_not_keep_the_others_waiting() -> None:
    hall = Hall(0, hint=0.1)
    async with bench(ScriptedEncoder([hall]), rows=ROWS * ITEMS, patience=600) as b:
        await b.usable(1)
        asking = await in_order(b, hall, 3)
        hall.seats = 3
        await eventually(lambda: len(hall.seated) == 3)  # and none of them has said a word
        for _ in asking:
            hall.leave.release()
        await asyncio.gather(*asking)


async def test_who_leaves_the_line_lets_the_next_one_come_up() -> None:
    hall = Hall(1)
    async with bench(encoder := ScriptedEncoder([hall]), rows=ROWS * ITEMS, patience=600) as b:
        await b.usable(1)
        seated, first, second, third = await in_order(b, hall, 4)
        second.cancel()  # in the middle
        first.cancel()  # whose turn it is
        await asyncio.wait({first, second})
        hall.leave.release()
        hall.leave.release()
        assert await asyncio.gather(seated, third) == [content(b"0"), content(b"3")]
        assert [call.data for call in encoder.calls] == [b"0", b"1", b"3"]


async def test_patience_ends_for_each_by_itself_and_who_comes_later_does_not_even_ask() -> None:
    hall = Hall(0)
    async with bench(encoder := ScriptedEncoder([hall]), rows=ROWS * ITEMS, patience=0.2) as b:
        await b.usable(1)
        answers = await asyncio.gather(*(b.whole(b"%d" % number) for number in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [Exhausted] * 3
        with pytest.raises(Exhausted) as error:
            await b.whole(b"later")
        assert (error.value.reason, error.value.field) == ("QUEUE_FULL", "here[0]")
        assert len(encoder.calls) == 3


async def test_what_is_more_urgent_comes_first() -> None:
    hall = Hall(1)
    async with bench(ScriptedEncoder([hall]), rows=ROWS * ITEMS, patience=600) as b:
        await b.usable(1)
        asking = await in_order(b, hall, 2)  # one has the seat, one is the first of the line
        for number in range(2, 6):
            wanted = replace(request(b"%d" % number), priority=number // 4)
            asking.append(asyncio.create_task(b.whole_of(wanted)))
            await eventually(lambda: len(b.pool.wait_queue) == len(asking) - 1)
        told = {each.name: each.samples[0].value for each in _media(b.cache, b.receiver, b.pool)}
        assert told["items_waiting_for_encoders"] == len(asking) - 1
        for _ in asking:
            hall.leave.release()
        await asyncio.gather(*asking)
        assert hall.seated == [b"0", b"1", b"4", b"5", b"2", b"3"]
