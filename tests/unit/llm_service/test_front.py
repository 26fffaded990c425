"""The front's side of the engine process: what becomes of it, and of whoever waits, when engines die or never come."""

from __future__ import annotations

import asyncio
import errno

import pytest

from common.errors import Internal
from llm_service.engine.front import EngineFront
from tests.unit.llm_service.scripted_engine import ScriptedEngine, front_of

NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")


async def start(front: EngineFront) -> None:
    await asyncio.wait_for(front.start(), 20)


async def test_a_first_engine_that_no_process_can_be_had_for_is_told_to_who_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = front_of(monkeypatch, NO_MEMORY)
    with pytest.raises(Internal):
        await start(front)
    await front.stop()


async def test_an_engine_comes_back_though_no_process_could_be_had_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    serves, told = asyncio.Event(), []

    def on_ready(ready: bool) -> None:
        told.append(ready)
        if told == [True, False, True]:
            serves.set()

    front = front_of(monkeypatch, first, NO_MEMORY, NO_MEMORY, second, on_ready=on_ready)
    first.serves()
    await start(front)
    second.serves()
    first.dies()
    await asyncio.wait_for(serves.wait(), 20)
    assert front.ready is not None
    await front.stop()
    assert told == [True, False, True, False]
