"""Properties of the single flight: callers come and go, workers fail and die, and everyone who stays gets an answer."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput, TwinlensError
from common.processes import ChildDied
from encoder_service.item import Key
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, turns
from tests.unit.encoder_service.test_encode import LAYOUT, SEEN, encoder, item

ITEMS = 4
OUTCOMES = {"done": DONE, "failed": BatchFailed(why="chance"), "died": ChildDied("chance")}

steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, ITEMS - 1), st.booleans()),
        st.tuples(st.just("come by key"), st.integers(0, ITEMS - 1), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("turn"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("break"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("flush"), st.just(0), st.booleans()),
    ),
    max_size=40,
)


async def _ask(made, wanted, *, rows: bool) -> None:
    async with made.ticket(wanted, "", rows=rows) as ticket:
        header = await ticket.header()
        await turns(1)
        if rows:
            await ticket.ready()
            with ticket.rows() as data:
                await turns(2)
                assert len(data) == header.tokens * LAYOUT.row_bytes


async def _play(monkeypatch, play, outcomes, decode_turns: int, room: int) -> None:
    decoders = FakeDecoders(SEEN, turns=decode_turns)
    answers = chain((OUTCOMES[each] for each in outcomes), repeat(DONE))
    rows = 4 * LAYOUT.row_bytes  # of one item
    settings_ = {"decoders": decoders, "answers": lambda _: next(answers), "store_bytes": room * rows}
    async with encoder(monkeypatch, **settings_) as (made, _):
        waiting: list[asyncio.Task[None]] = []
        keys = [await made._contents.key(item(number)) for number in range(ITEMS)]
        for what, number, flag in play:
            match what:
                case "come":
                    waiting.append(asyncio.create_task(_ask(made, item(number, priority=number), rows=flag)))
                case "come by key":
                    waiting.append(asyncio.create_task(_ask(made, item(source=Key(keys[number])), rows=flag)))
                case "leave" if number < len(waiting):
                    waiting[number].cancel()
                case "turn":
                    await turns(number)
                case "break":
                    decoders.failure = InvalidInput("chance") if number else None
                case "flush":
                    made.pipeline.store.flush()
            made.check_integrity()
            assert made.pipeline.store.used <= made.pipeline.store.capacity
        decoders.failure = None
        async with asyncio.timeout(20):
            found = await asyncio.gather(*waiting, return_exceptions=True)
        for each in found:
            assert each is None or isinstance(each, TwinlensError | asyncio.CancelledError), each
        assert not made._flights or all(not flight.tickets for flight in made._flights.values())


@settings(max_examples=150, deadline=None)
@given(steps, st.lists(st.sampled_from(sorted(OUTCOMES)), max_size=8), st.integers(0, 3), st.integers(1, 3))
def test_whatever_happens_everyone_gets_an_answer_and_nothing_is_left(play, outcomes, decode_turns, room):
    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(_play(monkeypatch, play, outcomes, decode_turns, room))


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
            assert made.counts["encoded"] <= 1

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(play(monkeypatch))
