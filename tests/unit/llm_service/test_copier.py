"""Copies by threads: all of it, in order, checked, and never behind the back of who has stopped waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing

import numpy as np
import pytest

from common.errors import DataLoss
from common.rows.wire import DType
from llm_service.encoders.transports import copier
from llm_service.encoders.transports.copier import Copier

PART = 2048
PARTS = 200


@pytest.fixture
def threads() -> Iterator[Copier]:
    made = Copier(DType.FLOAT32, part=PART, at_once=PART // 2)
    yield made
    made._threads.shutdown()


def numbers() -> np.ndarray:
    return np.arange(PARTS * PART // 4, dtype=np.float32)


@pytest.mark.parametrize("size", [4, PART // 2, PART, PART + 4, 7 * PART - 8, PARTS * PART])
async def test_everything_is_copied_and_told_of_in_order(threads: Copier, size: int) -> None:
    source, target = numbers().view(np.uint8)[:size], np.zeros(size, np.uint8)
    done = 0
    async for part in threads.copy(memoryview(target), memoryview(source)):
        done += part
        assert bytes(target[:done]) == bytes(source[:done])
    assert done == size


async def test_no_part_that_holds_a_number_which_is_not_finite_is_told_of(threads: Copier) -> None:
    source, target = numbers(), np.zeros(PARTS * PART, np.uint8)
    source[5 * PART // 4 + 3] = np.nan
    parts = threads.copy(memoryview(target), memoryview(source.view(np.uint8)))
    assert [await anext(parts) for _ in range(5)] == [PART] * 5
    with pytest.raises(DataLoss):
        await anext(parts)


async def test_whoever_stops_waiting_may_use_the_target_at_once(threads: Copier) -> None:
    source, target = numbers(), np.zeros(PARTS * PART, np.uint8)
    async with aclosing(threads.copy(memoryview(target), memoryview(source.view(np.uint8)))) as parts:
        assert await anext(parts) == PART
    target[:] = 0
    threads._threads.shutdown()  # whatever they still had to do is done
    assert not target.any()


async def test_a_copy_under_way_ends_when_the_threads_are_let_go(threads: Copier) -> None:
    source, target = numbers(), np.zeros(PARTS * PART, np.uint8)
    parts = threads.copy(memoryview(target), memoryview(source.view(np.uint8)))
    done = await anext(parts)
    threads.close()
    assert done + sum([part async for part in parts]) == PARTS * PART


async def test_one_who_is_told_twice_to_stop_waiting_waits_for_the_threads_all_the_same(
    threads: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def slow(target: memoryview, _: memoryview, __: DType) -> int:
        assert may_end.wait(180)
        return len(target)

    monkeypatch.setattr(copier, "_copy", slow)
    source, target = numbers(), np.zeros(PARTS * PART, np.uint8)

    async def copy() -> None:
        async with aclosing(threads.copy(memoryview(target), memoryview(source.view(np.uint8)))) as parts:
            await anext(parts)

    copying = asyncio.create_task(copy())
    for _ in range(3):
        for _ in range(5):
            await asyncio.sleep(0)
        copying.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    left = copying.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert not left, "the threads might still have been writing"
