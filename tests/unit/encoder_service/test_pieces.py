"""Pieces of a video: rows of the first may be read while a worker computes the others."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import TwinlensError
from common.media.item import Modality, Pixels
from encoder_service.engine import pipeline
from encoder_service.item import Inspection, Item
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.engines import encoder, rows
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, turns


@pytest.mark.parametrize("good", [True, False])
async def test_rows_that_have_landed_are_there_before_the_item_is_complete(monkeypatch, good):
    monkeypatch.setattr(pipeline, "cut", lambda grid, *_: [(group, group + 1) for group in range(grid.t)])
    clip = Item(Modality.VIDEO, Pixels(bytes(4 * 56 * 56 * 3), 4, 56, 56), field="items[0]")
    async with (
        encoder(monkeypatch, answers=None, staging=1 << 18, max_units=1) as (made, worker),
        made.ticket(clip, rows=True) as ticket,
    ):
        header = await made.resolve(ticket)
        more = asyncio.create_task(ticket.more(0))
        await turns(40)
        assert (len(worker.batches), more.done(), header.grid.t) == (1, False, 2)
        worker.say(DONE)
        await more
        assert (ticket.landed, ticket.flight.holds_entry) == (header.tokens // 2, False)
        assert ticket.allocation.span.size >= ticket.landed * 64
        rest = asyncio.create_task(ticket.more(ticket.landed))
        await turns(40)
        worker.say(DONE if good else BatchFailed(why="broken"))
        if good:
            await rest
            await ticket.ready()
            assert (ticket.landed, ticket.flight.holds_entry) == (header.tokens, True)
        else:
            with pytest.raises(TwinlensError):
                await rest
            assert ticket.allocation is None
            with pytest.raises(TwinlensError):
                await ticket.more(0)


def clip(monkeypatch, groups: int) -> Item:
    """A video whose frame groups go to workers one by one."""
    monkeypatch.setattr(pipeline, "cut", lambda grid, *_: [(group, group + 1) for group in range(grid.t)])
    return Item(Modality.VIDEO, Pixels(bytes(2 * groups * 56 * 56 * 3), 2 * groups, 56, 56), field="items[0]")


async def leave(waiting: asyncio.Task[bool]) -> None:
    """Cancels a wait for rows once all is done that can be."""
    await turns(40)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await turns(40)


async def test_a_video_that_nobody_wants_any_more_is_ended_with_the_piece_that_is_computed(monkeypatch):
    film, bounds = clip(monkeypatch, 4), {"staging": 1 << 18, "max_units": 1, "linger": 0.0}
    async with encoder(monkeypatch, answers=None, **bounds) as (made, worker):
        await leave(asyncio.create_task(rows(made, film)))
        assert made.pipeline.media.staging.used, "the worker reads there"
        worker.say(DONE)
        await turns(40)
        assert len(worker.batches) == 1
        made.check_idle()


class Slow(FakeDecoders):
    """Of eight frames it gives the first two, and no more."""

    def __init__(self) -> None:
        super().__init__(Inspection(56, 56, 8, 2.0))

    async def decode(self, *_, on_frames, **__) -> None:
        on_frames(2)
        await asyncio.Event().wait()


async def test_a_video_ends_with_its_first_piece_that_fails_though_frames_are_still_to_come(monkeypatch):
    monkeypatch.setattr(pipeline, "cut", lambda grid, *_: [(group, group + 1) for group in range(grid.t)])
    film = Item(Modality.VIDEO, b"\0\0\0\x20ftypisom", field="items[0]")
    failed = BatchFailed(why="broken")
    async with encoder(monkeypatch, answers=lambda _: failed, decoders=Slow(), staging=1 << 18) as (made, worker):
        waiting = asyncio.create_task(rows(made, film))
        await turns(100)
        assert len(worker.batches) == 1
        assert waiting.done()
        assert waiting.exception().reason == "ENCODE_FAILED"


async def test_a_video_goes_on_for_who_comes_back_at_once(monkeypatch):
    film, bounds = clip(monkeypatch, 2), {"staging": 1 << 18, "max_units": 1, "linger": 60.0}
    async with encoder(monkeypatch, answers=None, **bounds) as (made, worker):
        await leave(asyncio.create_task(rows(made, film)))
        worker.say(DONE)
        await turns(40)
        assert len(worker.batches) == 2, "it goes on meanwhile"
        back = asyncio.create_task(rows(made, film))
        await turns(40)
        worker.say(DONE)
        await back
        assert len(worker.batches) == 2


async def test_a_video_goes_on_where_all_of_it_has_begun(monkeypatch):
    film, bounds = clip(monkeypatch, 2), {"staging": 1 << 18, "max_units": 1, "linger": 0.0}
    async with encoder(monkeypatch, answers=None, **bounds) as (made, worker):
        waiting = asyncio.create_task(rows(made, film))
        await turns(40)
        worker.say(DONE)
        await leave(waiting)
        assert len(worker.batches) == 2
        worker.say(DONE)
        await turns(40)
        assert await rows(made, film)
        assert len(worker.batches) == 2
