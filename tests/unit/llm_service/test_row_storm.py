"""The rows of many requests at once over little room, from encoders of every temper, while callers leave at any moment:
whoever gets rows gets the item's own, and nothing is held at the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from common.errors import TwinlensError
from llm_service.generation.media_rows import MediaRows
from llm_service.request import PromptLayout, Span
from tests.unit.llm_service.scripted import (
    ROWS,
    RUN,
    Bench,
    Call,
    Say,
    ScriptedEncoder,
    bench,
    breaks_in_the_middle,
    content,
    damages_rows,
    eventually,
    is_full,
    request,
    well,
)
from twinlens import v1

REQUESTS, FILES = 24, [b"file %d" % number for number in range(6)]


async def turns(count: int) -> None:
    """Lets others work so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def breaks_at_the_end(call: Call) -> None:
    await call.header()
    for first in range(call.request.first_rows[0] if call.request.first_rows else 0, ROWS, RUN):
        await call.rows(first)
    await call.breaks()


async def is_refused(call: Call) -> None:
    await call.header()
    status = v1.Status(code=3, message="no", reason="MEDIA_UNREADABLE", field="items[0]")
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


TEMPERS = (breaks_at_the_end, breaks_in_the_middle, damages_rows, is_full, is_full, is_refused)


class Storm:
    """All requests over one bench; `rng` decides what comes of each."""

    def __init__(self, b: Bench, rng: random.Random) -> None:
        self._b, self._rng = b, rng
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        asking: list[asyncio.Task[None]] = []
        for _ in range(REQUESTS):
            asking.append(asyncio.create_task(self._ask()))
            await turns(self._rng.choice([0, 5, 100]))
            if self._rng.random() < 0.3:
                self._rng.choice(asking).cancel()
            if self._rng.random() < 0.1:
                self._b.cache.flush()
            self._b.cache.check_integrity()
        for ended in await asyncio.gather(*asking, return_exceptions=True):
            if not isinstance(ended, TwinlensError | asyncio.CancelledError | None):
                raise ended
            self.outcomes["done" if ended is None else getattr(ended, "reason", "left")] += 1

    async def _ask(self) -> None:
        """A request from its headers on; its engine may ask for rows again, and has read them now and then."""
        files = self._rng.choices(FILES, k=self._rng.choice([1, 1, 2]))
        fetches = await self._b.receiver.fetch_headers(request(*files))
        async with MediaRows(self._b.receiver, fetches) as media:
            if self._rng.random() < 0.4:
                async with media.at_encoders():
                    await turns(self._rng.randrange(200))
            spans = [Span(item, header, ()) for item, header in enumerate(media.headers)]
            covered = {item for item in range(len(files)) if self._rng.random() < 0.3}
            await media.take(PromptLayout([], spans), covered)
            for _ in range(self._rng.randrange(1, 4)):
                if self._rng.random() < 0.8:
                    await self._read(media, files)
                if self._rng.random() < 0.3:
                    media.rows_read()
                if self._rng.random() < 0.6:
                    await media._place()

    async def _read(self, media: MediaRows, files: list[bytes]) -> None:
        for item, entry in media._entries.items():
            await eventually(lambda entry=entry: entry.complete or entry.error is not None)
            if entry.error is not None:
                raise entry.error
            assert bytes(self._b.cache.buffer.slice(entry.place)) == content(files[item])
            self.outcomes["read"] += 1


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 40))])
async def test_whoever_gets_rows_gets_those_of_the_item_and_gives_them_back(seed: int) -> None:
    rng = random.Random(seed)

    async def any_temper(call: Call) -> None:
        await turns(rng.choice([0, 0, 50]))
        say: Say = well if rng.random() < 0.7 else rng.choice(TEMPERS)
        await say(call)

    encoders = [ScriptedEncoder([any_temper]) for _ in range(rng.choice([1, 2, 3]))]
    room, connections = rng.choice([2, 3, 5, 20]) * ROWS, rng.choice([1, 2])
    async with bench(*encoders, rows=room, patience=60, header_seconds=0, connections=connections) as b:
        await b.usable(len(encoders))
        storm = Storm(b, rng)
        await storm.run()
        assert storm.outcomes["read"] > REQUESTS / 4, storm.outcomes
        assert not b.receiver._early
        await b.cache.drain()
        await eventually(lambda: not b.receiver._others)
