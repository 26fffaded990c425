"""Who sends into one stream: everything arrives, no one runs ahead, closing it ends all."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from common.aio.merged import Send, merged
from tests.unit.encoder_service.fakes import turns


class Counted:
    """Sends (name, number), and knows how far it has come and whether it has ended."""

    def __init__(self, name: str, count: int, failure: Exception | None = None) -> None:
        self.name, self.count, self.failure = name, count, failure
        self.given, self.ended = 0, False

    async def run(self, send: Send[tuple[str, int]]) -> None:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.given += 1
                await send((self.name, number))
            if self.failure:
                raise self.failure
        finally:
            self.ended = True


async def test_every_event_of_every_stream_arrives_in_its_order():
    sources = [Counted("a", 5), Counted("b", 0), Counted("c", 9)]
    found = [event async for event in merged([source.run for source in sources])]
    for source in sources:
        assert [number for name, number in found if name == source.name] == list(range(source.count))
    assert all(source.ended for source in sources)


async def test_no_stream_runs_far_ahead_of_its_reader():
    sources = [Counted(name, 100) for name in "abc"]
    async with aclosing(merged([source.run for source in sources])) as events:
        await anext(events)
        await turns(50)
        assert sum(source.given for source in sources) <= 8
    assert all(source.ended for source in sources)


async def test_a_failure_reaches_the_reader_and_closes_the_others():
    sources = [Counted("a", 1, failure=LookupError("a")), Counted("b", 1000)]
    with pytest.raises(LookupError):
        async for _ in merged([source.run for source in sources]):
            pass
    assert all(source.ended for source in sources)
