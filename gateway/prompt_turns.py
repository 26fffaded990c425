"""Prompts of requests with several: how many of them are at LLM services at once, and whose is next. A request with one
prompt waits for none of them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from common.errors import Exhausted, TwinlensError
from gateway.request_context import RequestContext
from gateway.services import may_fare_better

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Event = TypeVar("Event")

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 2.0
"""Seconds until a prompt that was refused is asked again."""


class PromptTurns:
    """At most `each` prompts of one request are in progress at once, and `most` of all; the next turn goes to the
    request with the fewest."""

    def __init__(self, each: int, most: Callable[[], int]) -> None:
        self._each = each
        self._most = most
        self._out = 0
        self._waiting: dict[Batch, deque[asyncio.Future[None]]] = {}

    def batch(self, context: RequestContext, prompts: int) -> Batch:
        """The prompts of one request; if it has several, a prompt refused for want of room is asked again."""
        context.has_several = prompts > 1
        return Batch(self, min(self._each, prompts) if prompts > 1 else 0)

    async def take(self, batch: Batch) -> None:
        """Waits until one more prompt may go out."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(batch, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at this very moment
                self.give_back(batch)
            elif turn in self._waiting.get(batch, ()):
                self._waiting[batch].remove(turn)
                self._forget(batch)
            raise

    def give_back(self, batch: Batch) -> None:
        """A prompt is back."""
        self._out -= 1
        batch.out -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._out < self._most():
            batch = min(self._waiting, key=lambda each: each.out)
            turn = self._waiting[batch].popleft()
            self._forget(batch)
            if not turn.done():
                turn.set_result(None)
                self._out += 1
                batch.out += 1

    def _forget(self, batch: Batch) -> None:
        """Forgets a request that waits for nothing. Of those with equally many in progress, one that waits again comes
        last."""
        waiting = self._waiting.pop(batch)
        if waiting:
            self._waiting[batch] = waiting


@dataclass(frozen=True, slots=True)
class PromptBatches:
    """Requests with several prompts: their `turns`, the most prompts, and the most bytes of all together."""

    turns: PromptTurns
    max_prompts: int
    max_bytes: int


class Batch:
    """The prompts of one request, `most` of which are in progress at once; 0: it has one, which waits for no turn."""

    def __init__(self, turns: PromptTurns, most: int) -> None:
        self._turns = turns
        self._most: Final = most
        self.out = 0

    async def each(self, ask: Callable[[Item], Awaitable[Answer]], items: Sequence[Item]) -> list[Answer]:
        """The answer to each item; the first error cancels the others."""
        answers: dict[int, Answer] = {}
        left = iter(enumerate(items))

        async def work() -> None:
            for number, item in left:
                async with self._turn():
                    answers[number] = await ask(item)

        tasks = [asyncio.create_task(work()) for _ in range(self._most or 1)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _ended(tasks)
        return [answers[number] for number in range(len(items))]

    async def merged(self, sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[tuple[int, Event]]:
        """The events of several sources, each with its source's number, as they come. The first error ends all."""
        if not self._most:
            async with aclosing(sources[0]) as events:
                async for each in events:
                    yield 0, each
            return
        queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(1)
        left = iter(enumerate(sources))

        async def pump() -> None:
            try:
                for number, source in left:
                    async with self._turn(), aclosing(source) as events:
                        async for each in events:
                            await queue.put((number, each))
            except Exception as error:  # noqa: BLE001 - it is raised where the events are read
                await queue.put(error)
            else:
                await queue.put(None)

        pumps = [asyncio.create_task(pump()) for _ in range(self._most)]
        try:
            running = len(pumps)
            while running:
                match await queue.get():
                    case None:
                        running -= 1
                    case Exception() as error:
                        raise error
                    case said:
                        yield said
        finally:
            await _ended(pumps)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if not self._most:
            yield
            return
        await self._turns.take(self)
        try:
            yield
        finally:
            self._turns.give_back(self)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Patience:
    """How one prompt of several waits until it is asked again, within the time of its request."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._delay = _FIRST_DELAY

    async def wait(self, failure: TwinlensError) -> None:
        """Waits until it may be asked again. Raises the failure if waiting does not help, or there is no time."""
        room = isinstance(failure, Exhausted) and may_fare_better(failure)
        if not (self._context.has_several and room and self._delay < self._context.seconds_left):
            raise failure
        await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))  # so that refused prompts do not all return at once
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
