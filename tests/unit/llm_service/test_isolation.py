"""Items over which an encoder died are kept apart at the next one: the deadly one is found, and takes nobody along."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Internal
from llm_service.encoders import choice
from llm_service.encoders.isolation import Isolation
from tests.unit.llm_service.scripted import (
    ROWS,
    Bench,
    Call,
    Say,
    ScriptedEncoder,
    bench,
    content,
    eventually,
    key_of,
    well,
)
from twinlens import v1

INNOCENT = b"innocent"


def poison_with_ranks_of(b: Bench, innocent: bytes) -> bytes:
    """An item that prefers the same encoders in the same order as another one."""
    of_innocent = b.first_and_second(innocent)
    names = (b"poison %d" % number for number in range(1000))
    return next(name for name in names if b.first_and_second(name) == of_innocent)


def deadly(encoder: ScriptedEncoder, poison: bytes, company: asyncio.Event) -> Say:
    """A line of a script: the encoder dies over this item, when `company` is set; others wait to see it."""

    async def say(call: Call) -> None:
        if call.data == poison:
            await call.header()
            await company.wait()
            call.ending = asyncio.create_task(encoder.server.stop(None))
            await asyncio.Event().wait()
        elif any(other.data == poison for other in encoder.calls):
            await call.header()
            company.set()
            await asyncio.Event().wait()
        else:
            await well(call)

    return say


async def test_an_innocent_item_is_not_at_both_encoders_that_a_poison_ends() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(3))) as b:
        await b.usable(3)
        poison = poison_with_ranks_of(b, INNOCENT)
        first, _ = b.first_and_second(INNOCENT)
        company = asyncio.Event()
        first.script = [first.dies(2)]
        for encoder in b.encoders:
            if encoder is not first:
                encoder.script = [deadly(encoder, poison, company)]
        poisoned = asyncio.create_task(b.whole(poison))
        innocent = asyncio.create_task(b.whole(INNOCENT))
        innocent.add_done_callback(lambda _: company.set())
        assert await innocent == content(INNOCENT)
        with pytest.raises(Internal) as error:
            await poisoned
        assert error.value.reason == "POISON_ITEM"
        await b.usable(1)


async def test_suspects_go_one_after_the_other_where_one_encoder_is_left_and_others_go_as_ever() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(INNOCENT)
        files = [name for name in (b"item %d" % number for number in range(99)) if b.first_and_second(name)[0] is first]
        suspects = files[:4]
        other = next(name for name in (b"other %d" % n for n in range(99)) if b.first_and_second(name)[0] is second)
        may_end = asyncio.Event()
        there: set[bytes] = set()
        together: list[int] = []

        async def say(call: Call) -> None:
            if call.data not in suspects:
                await well(call)
                return
            there.add(call.data)
            together.append(len(there))
            await may_end.wait()
            there.discard(call.data)
            await well(call)

        first.script, second.script = [first.dies(4)], [say]
        asked = [asyncio.create_task(b.whole(name)) for name in suspects]
        await eventually(lambda: there)
        assert await b.whole(other) == content(other), "it waits for none of them"
        may_end.set()
        assert await asyncio.gather(*asked) == [content(name) for name in suspects]
        assert together == [1] * 4


async def test_suspects_of_one_request_wait_for_no_turn_of_each_other() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, _ = b.first_and_second(INNOCENT)
        names = (b"item %d" % number for number in range(99))
        pair = [name for name in names if b.first_and_second(name)[0] is first][:2]
        first.script = [first.dies(2)]
        entries = await b.land(*pair)
        await eventually(lambda: all(entry.complete for entry in entries))
        for entry in entries:
            b.cache.release(entry)


async def test_a_suspect_that_does_not_end_holds_others_up_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_APART_SECONDS", 0.1)
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(INNOCENT)
        names = (b"item %d" % number for number in range(99))
        slow = next(name for name in names if b.first_and_second(name)[0] is first)
        done = asyncio.Event()

        async def waits(call: Call) -> None:
            if call.data == slow:
                await done.wait()
            await well(call)

        first.script, second.script = [first.dies(2)], [waits]
        held = asyncio.create_task(b.whole(slow))
        innocent = asyncio.create_task(b.whole(INNOCENT))
        assert await innocent == content(INNOCENT)
        done.set()
        assert await held == content(slow)


async def test_a_suspect_storms_no_full_encoder_while_the_other_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_APART_SECONDS", 0.5)
    async with bench(*(ScriptedEncoder() for _ in range(3))) as b:
        await b.usable(3)
        suspects = INNOCENT, poison_with_ranks_of(b, INNOCENT)
        first, second = b.first_and_second(INNOCENT)
        (third,) = (encoder for encoder in b.encoders if encoder not in (first, second))
        done = asyncio.Event()

        async def holds(call: Call) -> None:
            await done.wait()
            await well(call)

        first.script, second.script, third.script = [first.dies(2)], [holds, well], [full_for_an_hour]
        asked = [asyncio.create_task(b.whole(name)) for name in suspects]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert len(third.calls) == 1, "it said when to ask again"
        done.set()
        assert await asyncio.gather(*asked) == [content(name) for name in suspects]


@pytest.mark.parametrize("dying_is_first", [True, False])
async def test_an_item_at_two_encoders_of_which_one_dies_is_a_suspect_at_the_other(dying_is_first: bool) -> None:
    """It was sent to a second one when no row came from the first."""
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=0.3) as b:
        await b.usable(2)
        first, second = b.first_and_second(INNOCENT)
        dying, left = (first, second) if dying_is_first else (second, first)
        names = (b"item %d" % number for number in range(99))
        other = next(name for name in names if b.first_and_second(name)[0] is dying)
        may_die, may_end = asyncio.Event(), asyncio.Event()
        there: list[bytes] = []

        async def is_alive(call: Call, until: asyncio.Event) -> None:
            await call.header()
            stage = "vit" if call.data == INNOCENT else "fetch"  # in which no other encoder is asked
            while not until.is_set():
                await call.context.write(v1.EncodeResponse(progress=v1.EncodeProgress(stage=stage)))
                await asyncio.sleep(0.02)

        async def dies(call: Call) -> None:
            await is_alive(call, may_die)
            call.ending = call.ending or asyncio.create_task(dying.server.stop(None))
            await asyncio.Event().wait()

        async def goes_on(call: Call) -> None:
            there.append(call.data)
            if call.data == INNOCENT:
                await is_alive(call, may_end)
                await call.rows(0, ROWS)
                await call.done()
            else:
                await well(call)

        dying.script, left.script = [dies], [goes_on]
        suspect = asyncio.create_task(b.whole(other))
        hedged = asyncio.create_task(b.whole(INNOCENT))
        await eventually(lambda: (dying.open, left.open) == (2, 1))
        may_die.set()
        await eventually(lambda: b.pool.quarantine.deaths(key_of(INNOCENT)))
        assert b.pool.isolation.taken(None) == {left.address}
        assert there == [INNOCENT], "its neighbour at the first waits for it"
        may_end.set()
        assert await asyncio.gather(hedged, suspect) == [content(INNOCENT), content(other)]
        assert there == [INNOCENT, other]


async def full_for_an_hour(call: Call) -> None:
    status = v1.Status(code=8, message="full", reason="QUEUE_FULL", retry_after_ms=3_600_000)
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


async def test_places_are_given_back_and_whoever_waits_is_told() -> None:
    isolation = Isolation()
    one, other = object(), object()
    with isolation.at("a", one), isolation.at("a", one), isolation.at("b", other):
        assert isolation.taken(one) == {"b"}
        assert isolation.taken(other) == {"a"}
        waiting = asyncio.create_task(isolation.one_left(float("inf")))
        await asyncio.sleep(0)
    await waiting
    assert not isolation.taken(None)
    await isolation.one_left(0.0)
