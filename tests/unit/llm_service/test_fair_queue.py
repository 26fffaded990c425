"""Callers take turns, and none has more at a time than his share."""

from __future__ import annotations

import asyncio

from llm_service.grammar.fair_queue import FairQueue


def asking(queue: FairQueue[str], caller: str, count: int) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(queue.get(caller)) for _ in range(count)]


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def served(*tasks: list[asyncio.Task[str]]) -> list[int]:
    return [sum(task.done() and not task.cancelled() for task in each) for each in tasks]


async def test_callers_are_served_in_turns_and_each_in_order() -> None:
    queue: FairQueue[str] = FairQueue(max_held=9)
    a, b, c = asking(queue, "a", 3), asking(queue, "b", 2), asking(queue, "c", 1)
    await turns()
    seen = []
    for _ in range(6):
        queue.put("x")
        await turns()
        seen.append(served(a, b, c))
    assert seen == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1]]
    assert a[0].done()


async def test_who_has_his_share_waits_though_one_is_free() -> None:
    queue: FairQueue[str] = FairQueue(max_held=1)
    for thing in ("x", "y"):
        queue.put(thing)
    a = asking(queue, "a", 3)
    await turns()
    assert served(a) == [1]
    b = asking(queue, "b", 1)
    await turns()
    assert served(a, b) == [1, 1]
    queue.put(await a[0])
    queue.leave("a")
    await turns()
    assert served(a) == [2]


async def test_who_leaves_is_passed_over_and_what_he_was_given_is_free_again() -> None:
    queue: FairQueue[str] = FairQueue(max_held=1)
    a, b = asking(queue, "a", 2), asking(queue, "b", 1)
    await turns()
    a[0].cancel()
    await turns()
    queue.put("x")
    a[1].cancel()  # it is his already, and he has not heard of it
    await turns()
    assert await b[0] == "x"
    assert served(a) == [0]
    queue.put("x")
    queue.leave("b")
    assert await queue.get("a") == "x", "nothing counts as his that he does not hold"
