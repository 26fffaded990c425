"""Properties of the single flight: callers come and go, workers fail and die, and everyone who stays gets an answer."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput, TwinlensError
from common.media.item import Key, Url
from common.process.children import ChildDied
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.engines import LAYOUT, PICTURES, SEEN, encoder, item
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, turns

ITEMS = 2
OUTCOMES = (DONE, BatchFailed(why="chance"), ChildDied("chance"))

steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, ITEMS - 1), st.booleans()),
        st.tuples(st.just("come by key"), st.integers(0, ITEMS - 1), st.booleans()),
        st.tuples(st.just("come by address"), st.integers(0, ITEMS - 1), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("turn"), st.sampled_from((1, 5, 40, 40)), st.booleans()),
        st.tuples(st.just("answer"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("break"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("flush"), st.just(0), st.booleans()),
    ),
    min_size=5,
    max_size=40,
)


class _Fetcher:
    def check(self, *_: object) -> None: ...

    async def fetch(self, address, max_bytes, field, caller, on_size) -> bytearray:
        content = PICTURES[int(address[-1])]
        for size in (len(content) // 2, len(content)):
            on_size(size)
            await turns(1)
        return bytearray(content)


async def _ask(made, wanted, *, rows: bool) -> None:
    async with made.ticket(wanted, rows=rows) as ticket:
        header = await made.resolve(ticket)
        await turns(1)
        if rows:
            await ticket.ready()
            with made.pipeline.store.pinned(ticket.allocation) as data:
                await turns(2)
                assert len(data) == header.tokens * LAYOUT.row_bytes


def _answer(made, outcome: int = 0) -> None:
    """The worker, if it has a batch, finishes or fails it, or dies over it."""
    child = made.pipeline.dispatcher._workers.slots[0].child
    if child is not None and child.batches:
        child.batches.clear()
        child.say(OUTCOMES[outcome])


async def _play(monkeypatch, play, decode_turns: int, room: int, size: int) -> None:
    decoders = FakeDecoders(SEEN, turns=decode_turns)
    rows = 4 * LAYOUT.row_bytes  # of one item
    async with encoder(
        monkeypatch, decoders=decoders, answers=None, store_bytes=room * rows, size=size, fetcher=_Fetcher()
    ) as (made, _):
        waiting: list[asyncio.Task[None]] = []
        keys = [await made._contents.key(item(number)) for number in range(ITEMS)]
        for what, number, flag in play:
            match what:
                case "come":
                    waiting.append(asyncio.create_task(_ask(made, item(number, priority=number), rows=flag)))
                case "come by key":
                    waiting.append(asyncio.create_task(_ask(made, item(source=Key(keys[number])), rows=flag)))
                case "come by address":
                    source = Url(f"http://a.test/{number}")
                    waiting.append(asyncio.create_task(_ask(made, item(source=source), rows=flag)))
                case "leave" if waiting:
                    waiting[number % len(waiting)].cancel()
                case "turn":
                    await turns(number)
                case "answer":
                    _answer(made, number)
                case "break":
                    decoders.failure = InvalidInput("chance") if number else None
                case "flush":
                    list(made.pipeline.store.flush_in_parts())
            made.check_integrity()
            assert made.pipeline.store.used <= made.pipeline.store.capacity
        decoders.failure = None
        async with asyncio.timeout(180):
            while made._flights or not all(task.done() for task in waiting):
                _answer(made)
                await turns(1)
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert each is None or isinstance(each, TwinlensError | asyncio.CancelledError), each


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(0, 3), st.integers(1, 3), st.sampled_from((len(PICTURES[0]), 1 << 20)))
def test_whatever_happens_everyone_gets_an_answer_and_nothing_is_left(play, decode_turns, room, size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(_play(monkeypatch, play, decode_turns, room, size))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(0, 59), max_size=20), st.integers(0, 8), st.booleans())
def test_one_item_is_computed_at_most_once_however_many_want_it_and_leave(count, leaving, pause, rows_first):
    async def play(monkeypatch) -> None:
        async with encoder(monkeypatch) as (made, worker):
            waiting = [asyncio.create_task(_ask(made, item(), rows=rows_first or n % 2 == 0)) for n in range(count)]
            await turns(pause)
            for number in set(leaving):
                if number < count:
                    waiting[number].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert sum(len(batch.pieces) for batch in worker.batches) <= 1
            assert made.totals.encoded <= 1

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(play(monkeypatch))
