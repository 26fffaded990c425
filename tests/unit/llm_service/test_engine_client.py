"""The front's side of the engine process: what becomes of it, and of whoever waits, when engines die or never come."""

from __future__ import annotations

import asyncio
import errno
from typing import Protocol

import msgspec
import pytest

from common.errors import Internal, Unavailable
from common.process.status import HELD_UP_SECONDS
from llm_service.engine.messages import AdapterRead, Add, Beat, DropAdapter, LoadAdapter, State
from llm_service.engine_client import processes
from llm_service.engine_client.client import EngineClient
from llm_service.request import SamplingParams
from tests.unit.llm_service.scripted import eventually
from tests.unit.llm_service.scripted_engine import START_SECONDS, STEP_SECONDS, Holder, ScriptedEngine, front_of

NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")


class Forward(Protocol):
    """Puts the event loop's clock forward, which stands still but for that: in steps in which its timers go off, or in
    one."""

    async def __call__(self, seconds: float, *, at_once: bool = False) -> None: ...


@pytest.fixture
async def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def put_forward(seconds: float, *, at_once: bool = False) -> None:
        nonlocal now
        steps = 1 if at_once else max(1, round(seconds / 0.25))
        for _ in range(steps):
            now += seconds / steps
            for _ in range(10):  # timers go off, and tasks hear of it
                await asyncio.sleep(0)

    return put_forward


async def start(front: EngineClient) -> None:
    await asyncio.wait_for(front.start(), 180)


async def test_how_a_first_engine_ended_is_told_to_who_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    engine.ended = "killed by SIGKILL"
    engine.dies()
    front = front_of(monkeypatch, engine)
    with pytest.raises(Internal, match=r"^the engine could not start: the process has ended \(killed by SIGKILL\)$"):
        await start(front)
    await front.stop()


async def test_a_first_engine_that_no_process_can_be_had_for_is_told_to_who_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = front_of(monkeypatch, NO_MEMORY)
    with pytest.raises(Internal):
        await start(front)
    await front.stop()


async def test_a_first_engine_that_hangs_while_it_loads_is_told_to_who_starts_it(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    front = front_of(monkeypatch, ScriptedEngine())
    starting = asyncio.create_task(front.start())
    for _ in range(10):
        await forward(START_SECONDS / 10.5)
    assert not starting.done()
    await forward(START_SECONDS / 10)
    with pytest.raises(Internal, match="it was not ready after 100 seconds"):
        await asyncio.wait_for(starting, 180)
    await front.stop()


async def test_blocks_are_found_again_only_where_the_engine_that_serves_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    front = front_of(monkeypatch, engine, ScriptedEngine())
    assert front.reusable_block_size is None
    engine.serves(prefix_caching=True)
    await start(front)
    assert front.reusable_block_size == 16
    engine.dies()
    await eventually(lambda: front.reusable_block_size is None)
    await front.stop()


async def test_a_later_engine_that_hangs_while_it_loads_is_replaced(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    first, hangs, third = ScriptedEngine(), ScriptedEngine(), ScriptedEngine()
    front = front_of(monkeypatch, first, hangs, third)
    first.serves()
    await start(front)
    first.dies()
    await forward(START_SECONDS)
    assert hangs.heard
    assert not hangs.killed
    await forward(1)
    third.serves()
    await forward(1)
    assert hangs.killed
    assert front.ready is not None
    await front.stop()


async def test_an_engine_that_falls_silent_is_frozen_unless_the_system_says_that_it_is_held_up(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    held_up = True
    monkeypatch.setattr(processes, "is_held_up", lambda _: held_up)
    engine = ScriptedEngine()
    front = front_of(monkeypatch, engine)
    engine.serves()
    await start(front)
    for _ in range(3):
        await forward(0.9 * HELD_UP_SECONDS)
        assert not engine.killed
        engine.says(Beat(State()))
        await forward(0)
    await forward(5)
    assert not engine.killed
    held_up = False
    await forward(1)
    assert engine.killed
    await front.stop()


async def test_an_engine_that_speaks_just_when_it_is_looked_at_is_heard_before_it_is_judged(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    """It got a core at last, beats, and sleeps again, all between two lines of this process."""
    engine = ScriptedEngine()
    looks = 0

    def beats(_: int) -> bool:
        nonlocal looks
        looks += 1
        engine.says(Beat(State()))
        return False

    monkeypatch.setattr(processes, "is_held_up", beats)
    front = front_of(monkeypatch, engine)
    engine.serves()
    await start(front)
    await forward(20)
    assert looks >= 4
    assert not engine.killed
    await front.stop()


async def test_an_engine_that_never_gets_through_with_a_step_is_replaced_though_it_beats(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    engine, second = ScriptedEngine(), ScriptedEngine()
    front = front_of(monkeypatch, engine, second)
    engine.serves()
    await start(front)
    for busy in (STEP_SECONDS - 1, 1.0, STEP_SECONDS):
        engine.says(Beat(State(), busy))
        await forward(1)
        assert not engine.killed
    engine.says(Beat(State(), STEP_SECONDS + 1))
    await forward(1)
    assert engine.killed
    second.serves()
    await forward(1)
    assert front.ready is not None
    await front.stop()


async def test_an_engine_that_is_held_up_for_ever_is_not_waited_for_as_long(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    monkeypatch.setattr(processes, "is_held_up", lambda _: True)
    engine = ScriptedEngine()
    front = front_of(monkeypatch, engine)
    engine.serves()
    await start(front)
    await forward(HELD_UP_SECONDS + 1)
    assert engine.killed
    await front.stop()


async def test_a_frozen_engine_is_found_by_a_loop_that_is_late_at_every_other_look(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    """Time in which the loop stands still is no silence, and does not make what it finds undone."""
    engine = ScriptedEngine()
    monkeypatch.setattr(processes, "is_held_up", lambda _: False)
    front = front_of(monkeypatch, engine)
    engine.serves()
    await start(front)
    for _ in range(3):  # three quarters of a second each in which it looks
        await forward(0.55, at_once=True)
        await forward(0.5)
    assert not engine.killed
    for _ in range(3):
        await forward(0.55, at_once=True)
        await forward(0.5)
    assert engine.killed
    await front.stop()


async def test_what_an_engine_said_while_this_loop_stood_still_is_read_before_it_is_judged(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    monkeypatch.setattr(processes, "is_held_up", lambda _: False)
    engine = ScriptedEngine()
    front = front_of(monkeypatch, engine)
    engine.serves()
    await start(front)
    await forward(100, at_once=True)
    engine.says(Beat(State()))
    await forward(3)
    assert not engine.killed
    await forward(1)
    assert engine.killed
    await front.stop()


async def test_of_an_engine_that_has_ended_nothing_runs_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    front = front_of(monkeypatch, first, second)
    first.serves()
    await start(front)
    first.says(Beat(State(running=3, waiting=5, kv_blocks_used=7, kv_blocks_total=8)))
    await forward(0)
    assert front.latest.running == 3
    first.dies()
    await forward(0)
    assert front.latest == State(), "though the next one may take long to load"
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
    await asyncio.wait_for(serves.wait(), 180)
    assert front.ready is not None
    await front.stop()
    assert told == [True, False, True, False]


LACKING = AdapterRead(1, error="can't start new thread", passing=True)


@pytest.mark.parametrize("passes", [True, False])
async def test_an_adapter_is_lost_only_where_a_lack_of_threads_lasts(
    passes: bool, monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    front, lost = front_of(monkeypatch, first, second), list[int]()
    front.on_adapter_lost = lost.append
    first.serves()
    await start(front)
    loading = asyncio.create_task(front.load_adapter("x"))
    first.says(AdapterRead(1, digest=b"its"))
    await loading
    first.dies()
    second.serves()
    for count in range(1, 4 if passes else 12):
        await forward(1)
        assert second.told(LoadAdapter) == [LoadAdapter(1, "x", b"its")] * count
        assert front.ready is None
        second.says(LACKING)
        await forward(0)
    if passes:
        await forward(1)
        second.says(AdapterRead(1, digest=b"its"))
        await forward(0)
    assert lost == ([] if passes else [1])
    assert front.ready is not None, "it serves, with the adapter or without"
    await front.stop()


async def test_an_adapter_that_nobody_waits_for_any_more_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    engine = ScriptedEngine()
    front = front_of(monkeypatch, engine)
    engine.serves()
    await start(front)
    left, leaves_too = (asyncio.create_task(front.load_adapter(path)) for path in "xy")
    await forward(0)
    for loading in (left, leaves_too):
        loading.cancel()
    engine.says(AdapterRead(1, digest=b"its"))
    await forward(0)
    assert engine.told(DropAdapter) == [DropAdapter(1)]
    await front.stop()
    assert front._keeper is not None
    assert front._keeper.cancelled(), "the end of the engine is told to nobody who has left"


async def test_no_engine_gets_a_request_whose_adapter_was_lost_while_its_prompt_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would end with it: no rank has what the request is to be computed with."""
    first, second = ScriptedEngine(), ScriptedEngine()
    front = front_of(monkeypatch, first, second)
    first.serves()
    await start(front)
    loading = asyncio.create_task(front.load_adapter("x"))
    first.says(AdapterRead(1, digest=b"its"))
    await loading
    add = Add(
        id=front.next_id(),
        token_ids=bytes(4),
        positions=bytes(12),
        mrope_delta=0,
        items=[],
        sampling=SamplingParams(max_tokens=1),
        salt="",
        priority=0,
        deadline=None,
        adapter=1,
    )
    front.submit(add, Holder())
    assert first.told(Add) == [add]
    first.dies()
    second.serves()
    second.says(AdapterRead(1, error="its folder has another adapter by now"))
    await eventually(lambda: front.deaths and front.ready is not None)
    with pytest.raises(Unavailable) as error:
        front.submit(msgspec.structs.replace(add, id=front.next_id()), Holder())
    assert (error.value.reason, second.told(Add)) == ("ADAPTER_LOST", [])
    await front.stop()
