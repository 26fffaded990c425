"""What is done for one item, between its content and a worker."""

from __future__ import annotations

import random
import threading
import tracemalloc

from encoder_service.engine import pipeline
from encoder_service.item import Item, Modality, Pixels
from tests.unit.encoder_service.fakes import DONE
from tests.unit.encoder_service.test_encode import encoder, rows


async def test_decoded_frames_are_copied_once_and_the_last_one_fills_its_group(monkeypatch):
    data = random.Random(0).randbytes(3 * 560 * 1120 * 3)  # more than is copied on the event loop
    staged: list[bytes] = []

    def answer(batch):
        (piece,) = batch.pieces
        staged.append(bytes(made.pipeline.staging.buffer.view[piece.pixels :][: 4 * len(data) // 3]))
        return DONE

    async with encoder(monkeypatch, answers=answer, staging=16 << 20) as (made, _):
        copied: list[tuple[bool, int]] = []
        monkeypatch.setattr(pipeline, "_copy", _measured(pipeline._copy, copied))
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
