"""Pieces of a video: rows of the first may be read while a worker computes the others."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import TwinlensError
from encoder_service.engine import pieces
from encoder_service.item import Item, Modality, Pixels
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.fakes import DONE
from tests.unit.encoder_service.test_encode import encoder, turns


@pytest.mark.parametrize("good", [True, False])
async def test_rows_that_have_landed_are_there_before_the_item_is_complete(monkeypatch, good):
    monkeypatch.setattr(pieces, "cut", lambda grid, *_: [(group, group + 1) for group in range(grid.t)])
    clip = Item(Modality.VIDEO, Pixels(bytes(4 * 56 * 56 * 3), 4, 56, 56), field="items[0]")
    async with (
        encoder(monkeypatch, answers=None, staging=1 << 18, most_units=1) as (made, worker),
        made.ticket(clip, "", rows=True) as ticket,
    ):
        header = await ticket.header()
        more = asyncio.create_task(ticket.more(0))
        await turns(40)
        assert (len(worker.batches), more.done(), header.grid.t) == (1, False, 2)
        worker.say(DONE)
        await more
        assert (ticket.landed, ticket.flight.holds_entry) == (header.tokens // 2, False)
        assert ticket.place.span.size >= ticket.landed * 64
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
            with pytest.raises(TwinlensError):
                _ = ticket.place
