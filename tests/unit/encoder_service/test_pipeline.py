"""What is done for one item, between its content and a worker."""

from __future__ import annotations

import asyncio
import random
import threading
import tracemalloc

import pytest

from common.media.item import Modality, Pixels
from encoder_service.engine import media_loader
from encoder_service.item import Inspection, Item
from tests.unit.encoder_service.engines import encoder, item, rows
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, turns


async def test_decoded_frames_are_copied_once_and_the_last_one_fills_its_group(monkeypatch):
    data = random.Random(0).randbytes(3 * 560 * 1120 * 3)  # more than is copied on the event loop
    staged: list[bytes] = []

    def answer(batch):
        (piece,) = batch.pieces
        staged.append(bytes(made.pipeline.media.staging.buffer.view[piece.pixels :][: 4 * len(data) // 3]))
        return DONE

    async with encoder(monkeypatch, answers=answer, staging=16 << 20) as (made, _):
        copied: list[tuple[bool, int]] = []
        monkeypatch.setattr(media_loader, "_copy", _measured(media_loader._copy, copied))
        tracemalloc.start()
        try:
            await rows(made, Item(Modality.VIDEO, Pixels(data, 3, 560, 1120), field="items[0]"))
        finally:
            tracemalloc.stop()
        assert staged == [data + data[2 * len(data) // 3 :]]
        ((on_the_loop, most),) = copied
        assert not on_the_loop
        assert most < len(data) // 2, "there is another copy of them"


def _measured(copy, into: list[tuple[bool, int]]):
    """Notes of each copy whether the event loop made it, and the most that was allocated until then, in bytes."""

    def measured(*args) -> None:
        copy(*args)
        into.append((threading.current_thread() is threading.main_thread(), tracemalloc.get_traced_memory()[1]))

    return measured


class Busy(FakeDecoders):
    """Jobs of one kind, of videos, go on until `go_on` is set."""

    def __init__(self, kind: str) -> None:
        super().__init__(Inspection(56, 56, 4, 2.0))
        self.kind = kind
        self.go_on = asyncio.Event()

    async def inspect(self, data, *, key, modality, field, time_budget, with_sound):
        if modality is Modality.VIDEO and self.kind == "inspect":
            await self.go_on.wait()
        return self.seen if modality is Modality.VIDEO else Inspection(56, 56)

    async def decode(self, data, pixels, plan, *, key, modality, field, on_frames, time_budget):
        if modality is Modality.VIDEO and self.kind == "decode":
            await self.go_on.wait()


@pytest.mark.parametrize("kind", ["inspect", "decode"])
async def test_videos_that_wait_for_a_process_hold_no_memory_that_pictures_need(monkeypatch, kind):
    videos = [b"\0\0\0\x20ftypisom" + bytes([number]) * 20_000 for number in range(8)]
    decoders = Busy(kind)
    async with encoder(monkeypatch, decoders=decoders, staging=128 << 10) as (made, _):
        flood = [asyncio.create_task(rows(made, Item(Modality.VIDEO, data, field="items[0]"))) for data in videos]
        await turns(100)
        picture = asyncio.create_task(rows(made, item()))
        await turns(100)
        assert picture.done()
        assert not any(each.done() for each in flood)
        decoders.go_on.set()
        await asyncio.gather(*flood)


@pytest.mark.parametrize("kind", ["inspect", "decode"])
async def test_who_leaves_gives_its_turn_to_the_next_video(monkeypatch, kind):
    decoders = Busy(kind)
    async with encoder(monkeypatch, decoders=decoders, staging=128 << 10) as (made, _):
        for number in range(3):
            data = b"\0\0\0\x20ftypisom" + bytes([number]) * 100
            waiting = asyncio.create_task(rows(made, Item(Modality.VIDEO, data, field="items[0]")))
            await turns(50)
            assert made.pipeline.media.staging.used
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await turns(50)
            assert not made.pipeline.media.staging.used


async def test_all_jobs_of_an_item_draw_on_one_allowance(monkeypatch):
    decoders = FakeDecoders(Inspection(56, 56))
    async with encoder(monkeypatch, decoders=decoders) as (made, _):
        await rows(made, item())
    first, second = decoders.time_budgets
    assert first is second
