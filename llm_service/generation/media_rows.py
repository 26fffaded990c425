"""The rows of one request's media, from their headers to the moment in which the engine no longer reads them.

Rows that the prefix cache covers are not fetched: their items have no place in the arena, and the engine, which knows
what its cache still holds, asks for them where it does need them after all. So there is never a hole. A request that
has to wait for room gives back what it has, and takes everything at once: no two can hold each other up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from common import tasks
from common.errors import TwinlensError
from common.media.item import Header
from llm_service.encoders.encoder_cache import CacheEntry, Watcher
from llm_service.encoders.fetch import Fetch
from llm_service.encoders.receiver import RowReceiver, headers
from llm_service.engine.front import EngineFront
from llm_service.engine.messages import NOWHERE, ItemRows
from llm_service.engine.ticket import Ticket
from llm_service.request import PromptLayout, Request


class MediaRows:
    """Made and left by the request's task; `release` is called by the engine, once it was given the request.

    Entries come back with `release`; streams with `leave`, or with the last reference to what they bring.
    """

    def __init__(self, receiver: RowReceiver, request: Request) -> None:
        self._receiver = receiver
        self._request = request
        self._fetches: list[Fetch] = []
        self._entries: dict[int, CacheEntry] = {}
        self._used: list[Fetch] = []
        self._taken = self._released = self._left = False
        self._watched: list[tuple[CacheEntry, Watcher]] = []
        self._placing: asyncio.Task[None] | None = None

    async def fetch_headers(self) -> list[Header]:
        """The headers of all items, in order; raises the error of the first item that has none."""
        if self._request.media:
            self._fetches = await self._receiver.fetch_headers(self._request)
            self._used.extend(self._fetches)
        return headers(self._fetches)

    async def take(self, covered: Collection[int]) -> None:
        """Room for the rows of every item, all at once, but of those in `covered` that are not here anyway.

        Raises InvalidInput where the rows of all items could never be here together.
        """
        self._receiver.check_size(self._fetches)
        covered = {item for item in covered if not self._receiver.has_rows(self._fetches[item])}
        self._receiver.close([self._fetches[item] for item in covered])
        self._receiver.counters.covered += len(covered)
        self._taken = True
        await self._acquire([item for item in range(len(self._fetches)) if item not in covered])

    def items(self, layout: PromptLayout) -> list[ItemRows]:
        """What the engine is told of each span."""
        return [
            ItemRows(span.header.key, place, [(run.start, run.first_row, run.count) for run in span.runs], landed)
            for span, (place, landed) in zip(layout.spans, self._places(layout), strict=True)
        ]

    def follow(
        self, engine: EngineFront, ticket: Ticket, layout: PromptLayout, on_complete: Callable[[], None]
    ) -> None:
        """Passes every landing on to the engine, places what it asks for, and fails the request with its item."""

        def watch() -> None:
            for number, span in enumerate(layout.spans):
                if (entry := self._entries.get(span.item)) is not None:
                    tell = self._watcher(engine, ticket, layout, number, on_complete)
                    entry.watchers.append(tell)
                    self._watched.append((entry, tell))
                    tell(entry)

        async def place() -> None:
            try:
                await self._place()
            except TwinlensError as error:
                ticket.fail(error)
                return
            engine.placed(ticket.id, self._places(layout))
            watch()

        def wanted() -> None:
            if self._left:  # the engine asked before it heard of that
                return
            self._placing = tasks.start(place(), "rows that the engine asked for")

        watch()
        ticket.on_rows_needed = wanted

    def _watcher(
        self, engine: EngineFront, ticket: Ticket, layout: PromptLayout, number: int, on_complete: Callable[[], None]
    ) -> Watcher:
        field = self._request.media[layout.spans[number].item].field

        def tell(entry: CacheEntry) -> None:
            if entry.error is not None:
                ticket.fail(entry.error_at(field))
                return
            engine.landed(ticket.id, number, entry.landed)
            if all(other.complete for other in self._entries.values()):
                on_complete()

        return tell

    def _places(self, layout: PromptLayout) -> list[tuple[int, int]]:
        """(offset, rows that have landed) of each span's item."""
        entries = [self._entries.get(span.item) for span in layout.spans]
        return [(NOWHERE, 0) if entry is None else (entry.place.offset, entry.landed) for entry in entries]

    async def _place(self) -> None:
        """Takes places for all items together; the engine has forgotten those that it knew."""
        self._unwatch()
        self._receiver.counters.covered -= len(self._fetches) - len(self._entries)
        self._give_back()
        self._fetches = [fetch.renewed() for fetch in self._fetches]
        self._used.extend(self._fetches)
        await self._acquire(list(range(len(self._fetches))))
        if self._released:
            self._give_back()

    async def _acquire(self, items: list[int]) -> None:
        entries = await self._receiver.acquire([self._fetches[item] for item in items])
        self._entries |= dict(zip(items, entries, strict=True))

    def _give_back(self) -> None:
        while self._entries:
            self._receiver.release(self._entries.popitem()[1])

    def _unwatch(self) -> None:
        for entry, tell in self._watched:
            entry.watchers.remove(tell)
        self._watched.clear()

    def release(self) -> None:
        """Gives every entry back: nobody reads them any more."""
        self._released = True
        self._give_back()

    def abandon(self) -> None:
        """Gives everything back where the engine was never given the request."""
        self.release()
        if not self._taken:  # else their streams belong to what they fill
            self._receiver.close(self._fetches)

    async def leave(self) -> None:
        """The request has ended for its caller: nothing more is passed on, or placed."""
        self._left = True
        self._unwatch()
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.gather(self._placing, return_exceptions=True)

    def seconds(self) -> dict[str, float]:
        """What this service and encoders spent on the items, by stage, summed over items; landing and encoders' stages
        are of those items alone that this request brought in."""
        total: Counter[str] = Counter()
        for fetch in self._used:
            total.update(fetch.seconds)
        return dict(total)
