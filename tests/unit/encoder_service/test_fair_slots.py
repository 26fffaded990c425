"""Slots: nobody can take all of those for downloads, and who waits is served in turns."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DeadlineExceeded
from common.media.item import Modality, Url
from encoder_service.item import Item
from encoder_service.media.fair_slots import FairSlots
from encoder_service.media.fetch import FetchConfig, Fetcher
from tests.media_host import media_host
from tests.unit.encoder_service.fakes import turns
from tests.waiting import eventually

GOOD = b"good" * 1000


def caller(name: str) -> tuple[str, str]:
    return name, ""


async def claims(slots: FairSlots, *whose: tuple[str, str]) -> list[asyncio.Task[ExitStack]]:
    """For each (host, caller), who asks for a slot."""
    asked = [asyncio.create_task(slots.take(caller(name), host)) for host, name in whose]
    await turns()
    return asked


def held(asked: list[asyncio.Task[ExitStack]]) -> int:
    return sum(each.done() for each in asked)


async def test_one_host_gets_half_of_the_slots_and_each_further_one_half_of_the_rest():
    slots = FairSlots(16, kept_free=True)
    got = [held(await claims(slots, *[(host, f"{host}{number}") for number in range(16)])) for host in "abcde"]
    assert got == [8, 4, 2, 1, 1]


async def test_one_caller_gets_half_of_the_slots_whatever_hosts_it_names():
    slots = FairSlots(16, kept_free=True)
    assert held(await claims(slots, *[(f"host {number}", "greedy") for number in range(100)])) == 8
    assert held(await claims(slots, ("host 0", "another"))) == 1


async def test_of_those_who_wait_the_one_with_the_fewest_slots_is_next():
    slots = FairSlots(4, kept_free=True)
    greedy = await claims(slots, *[("a", "greedy")] * 6)
    assert held(greedy) == 2
    others = await claims(slots, ("b", "modest"), ("c", "new"), ("d", "last"))
    assert held(others) == 2
    greedy[0].result().close()
    await turns()
    assert (held(others), held(greedy)) == (3, 2)
    for each in (*others, greedy[1]):
        each.result().close()
    await turns()
    assert held(greedy) == 4


@pytest.mark.parametrize("kept_free", [False, True])
async def test_callers_take_turns_with_a_single_slot_however_many_each_wants(kept_free):
    slots, order = FairSlots(1, kept_free=kept_free), []

    async def use(name: str) -> None:
        with await slots.take(caller(name)):
            order.append(name)
            await turns(1)

    async with asyncio.TaskGroup() as asked:
        for name in "aaaabbcb":
            asked.create_task(use(name))
    assert "".join(order) == "abcababa"


async def test_a_newcomer_does_not_pass_those_who_wait_their_turn():
    slots = FairSlots(1, kept_free=False)
    first, second = await claims(slots, ("", "a"), ("", "a"))
    first.result().close()
    await turns()
    (third,) = await claims(slots, ("", "a"))
    newcomers = await claims(slots, ("", "b"), ("", "c"))
    second.result().close()
    await turns()
    assert (newcomers[0].done(), third.done()) == (True, False)
    late = await claims(slots, ("", "d"))
    for each in (newcomers[0], newcomers[1], third):
        each.result().close()
        await turns()
    assert late[0].done(), "after all of them"


async def test_who_leaves_while_waiting_or_at_the_last_moment_takes_no_slot_along():
    slots = FairSlots(2, kept_free=True)
    (first, waiting, last) = await claims(slots, *[("a", "x")] * 3)
    waiting.cancel()
    first.result().close()
    last.cancel()  # it has been given a slot, and does not know yet
    await asyncio.gather(waiting, last, return_exceptions=True)
    assert held(await claims(slots, ("a", "x"), ("b", "y"))) == 2


async def test_a_slot_is_given_back_once():
    slots = FairSlots(1, kept_free=True)
    with await slots.take(caller("x"), "a") as slot:
        slot.close()
    first, second = await claims(slots, ("a", "x"), ("a", "x"))
    assert (first.done(), second.done()) == (True, False)
    second.cancel()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.booleans()), max_size=40))
def test_no_slot_is_lost_or_given_twice(steps):
    async def run() -> None:
        slots, asked = FairSlots(5, kept_free=True), []
        for host, name, leave in steps:
            asked += await claims(slots, (host, name))
            if leave:
                each = asked.pop(0)
                each.result().close() if each.done() else each.cancel()
                await turns(2)
            assert held(asked) <= 5
        for _ in range(len(asked)):
            await turns(2)
            if ready := [each for each in asked if each.done()]:
                ready[0].result().close()
                asked.remove(ready[0])
        assert not asked, "whoever waits is served in the end"
        assert held(await claims(slots, *[(f"{number}", f"{number}") for number in range(9)])) == 5

    asyncio.run(run())


async def test_a_host_that_drips_keeps_nobody_else_waiting():
    with media_host(good=GOOD) as slow, media_host(good=GOOD) as quick:
        made = Fetcher(FetchConfig(allow_private_media_host=(slow.authority, f"localhost:{quick.port}")))
        dripping = [
            asyncio.create_task(made.fetch(slow.url("/held"), 1 << 20, "url", caller(f"tenant {number}")))
            for number in range(40)
        ]
        await eventually(lambda: slow.asked["/held"] == 16, "half of the slots are taken")
        assert await made.fetch(quick.url("/good", "localhost"), 1 << 20, "url", caller("tenant 0")) == GOOD
        assert slow.asked["/held"] == 16
        slow.held.set()
        assert await asyncio.gather(*dripping) == [GOOD] * 40


async def test_the_time_for_a_download_runs_from_the_asking():
    with media_host(good=GOOD) as slow:
        made = Fetcher(FetchConfig(allow_private_media_host=(slow.authority,), max_fetches=2, fetch_seconds=0.3))
        url = slow.url("/held")
        with await made._downloads.take(caller("a"), made.check(url, "").host):  # the host has no second slot
            with pytest.raises(DeadlineExceeded) as waited:
                await made.fetch(url, 1 << 20, "items[0].url", caller("b"))
            assert (waited.value.reason, waited.value.field) == ("FETCHES_BUSY", "items[0].url")
            assert not slow.asked["/held"]
        while not slow.asked["/held"]:  # where the time was over before the host was reached
            with pytest.raises(DeadlineExceeded) as served:
                await made.fetch(url, 1 << 20, "items[0].url", caller("b"))
            assert served.value.reason == "MEDIA_HOST_SLOW"


def test_a_caller_is_its_tenant_or_where_it_connects_from():
    source = Url("http://a.test/")
    assert Item(Modality.IMAGE, source, salt="one", host="ipv4:10.0.0.1").caller == ("one", "")
    assert Item(Modality.IMAGE, source, host="ipv4:10.0.0.1").caller == ("", "ipv4:10.0.0.1")
