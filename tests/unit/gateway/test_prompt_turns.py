"""How many prompts of requests with several are out at once, and whose is next."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import pytest

from common.errors import Exhausted
from gateway.dialect import dialect_of
from gateway.prompt_turns import Batch, PromptTurns
from gateway.request_context import BodyBudget, BodyLease, RequestContext


def context() -> RequestContext:
    return RequestContext("a", (), BodyLease(BodyBudget(1)), dialect_of("/v1/embeddings"))


class Service:
    """Answers whom it is told to, and knows who is there."""

    def __init__(self) -> None:
        self.here: list[tuple[str, asyncio.Future[None]]] = []
        self.came: list[str] = []

    async def ask(self, who: str) -> str:
        self.came.append(who)
        one = who, asyncio.get_running_loop().create_future()
        self.here.append(one)
        try:
            await one[1]
        finally:
            self.here.remove(one)
        return who

    async def source(self, who: str) -> AsyncGenerator[str]:
        yield await self.ask(who)

    @property
    def counts(self) -> Counter[str]:
        return Counter(who for who, _ in self.here)

    async def answer(self, number: int = 0) -> None:
        self.here[number][1].set_result(None)
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def asking(service: Service, batch: Batch, who: str, count: int) -> asyncio.Task[list[str]]:
    return asyncio.create_task(batch.each(service.ask, [who] * count))


async def test_prompts_wait_for_others_of_their_request_and_of_all() -> None:
    service, turns = Service(), PromptTurns(3, lambda: 5)
    tasks = [asking(service, turns.batch(context(), 9), who, 9) for who in "ab"]
    await settled()
    assert service.counts == {"a": 3, "b": 2}
    while service.here:
        await service.answer()
        assert len(service.here) <= 5
        assert all(count <= 3 for count in service.counts.values())
    assert [await task for task in tasks] == [["a"] * 9, ["b"] * 9]


async def test_the_next_turn_is_that_of_the_request_with_fewest_prompts_out() -> None:
    service, turns = Service(), PromptTurns(4, lambda: 4)
    tasks = [asking(service, turns.batch(context(), 50), "a", 50)]
    await settled()
    tasks += [asking(service, turns.batch(context(), 3), who, 3) for who in "bc"]
    await settled()
    assert service.counts == {"a": 4}
    for counts in ({"a": 3, "b": 1}, {"a": 2, "b": 1, "c": 1}):
        await service.answer()
        assert service.counts == counts
    while tasks[1:] and not all(task.done() for task in tasks[1:]):
        await service.answer()
    assert service.came.count("a") < 50
    tasks[0].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[0]


async def test_a_single_prompt_waits_for_no_turn() -> None:
    service, turns = Service(), PromptTurns(1, lambda: 1)
    several = asking(service, turns.batch(context(), 2), "a", 2)
    single = asking(service, turns.batch(context(), 1), "b", 1)
    await settled()
    assert service.counts == {"a": 1, "b": 1}
    for _ in range(3):
        await service.answer()
    assert (await several, await single) == (["a", "a"], ["b"])


@pytest.mark.parametrize("way", ["cancelled", "failed", "cancelled as its turn comes"])
def test_a_request_that_ends_gives_its_turns_to_others(way: str) -> None:
    async def run() -> None:
        service, turns = Service(), PromptTurns(2, lambda: 2)
        one = asking(service, turns.batch(context(), 9), "a", 9)
        await settled()
        leaving = asking(service, turns.batch(context(), 9), "b", 9)
        other = asking(service, turns.batch(context(), 2), "c", 2)
        await settled()
        if way == "failed":
            service.here[0][1].set_exception(Exhausted("full"))
            await settled()
            with pytest.raises(Exhausted):
                await one
            leaving.cancel()
        else:
            if way == "cancelled as its turn comes":
                service.here[0][1].set_result(None)
                await asyncio.sleep(0)
            for task in (leaving, one):
                task.cancel()
        await settled()
        assert service.counts == {"c": 2}
        for _ in range(2):
            await service.answer()
        assert await other == ["c", "c"]
        again = asking(service, turns.batch(context(), 2), "d", 2)
        await settled()
        assert service.counts == {"d": 2}
        again.cancel()
        await settled()

    asyncio.run(run())


async def test_events_of_several_prompts_take_turns_as_well() -> None:
    service, turns = Service(), PromptTurns(2, lambda: 8)
    merged = turns.batch(context(), 3).merged([service.source(who) for who in "abc"])
    async with aclosing(merged) as events:
        first = asyncio.ensure_future(anext(events))
        await settled()
        assert service.came == ["a", "b"]
        await service.answer()
        assert await first == (0, "a")
        await settled()
        assert service.came == ["a", "b", "c"]
    await settled()
    assert not service.here
