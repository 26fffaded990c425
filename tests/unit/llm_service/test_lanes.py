"""Callers take turns, and none has more at a time than his share."""

from __future__ import annotations

import asyncio

from llm_service.grammar.fair_queue import Lanes


def asking(lanes: Lanes[str], caller: str, count: int) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(lanes.get(caller)) for _ in range(count)]


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def served(*tasks: list[asyncio.Task[str]]) -> list[int]:
    return [sum(task.done() and not task.cancelled() for task in each) for each in tasks]


async def test_callers_are_served_in_turns_and_each_in_order() -> None:
    lanes: Lanes[str] = Lanes(most=9)
    a, b, c = asking(lanes, "a", 3), asking(lanes, "b", 2), asking(lanes, "c", 1)
    await turns()
    seen = []
    for _ in range(6):
        lanes.put("x")
        await turns()
        seen.append(served(a, b, c))
    assert seen == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1]]
    assert a[0].done()


async def test_who_has_his_share_waits_though_one_is_free() -> None:
    lanes: Lanes[str] = Lanes(most=1)
    for thing in ("x", "y"):
        lanes.put(thing)
    a = asking(lanes, "a", 3)
    await turns()
    assert served(a) == [1]
    b = asking(lanes, "b", 1)
    await turns()
    assert served(a, b) == [1, 1]
    lanes.put(await a[0])
    lanes.leave("a")
    await turns()
    assert served(a) == [2]


async def test_who_leaves_is_passed_over_and_what_he_was_given_is_free_again() -> None:
    lanes: Lanes[str] = Lanes(most=1)
    a, b = asking(lanes, "a", 2), asking(lanes, "b", 1)
    await turns()
    a[0].cancel()
    await turns()
    lanes.put("x")
    a[1].cancel()  # it is his already, and he has not heard of it
    await turns()
    assert await b[0] == "x"
    assert served(a) == [0]
    lanes.put("x")
    lanes.leave("b")
    assert await lanes.get("a") == "x", "nothing counts as his that he does not hold"
