"""The rows of one request's media, from their headers to the moment in which the engine no longer reads them.

Rows that the prefix cache covers are not fetched: their items have no place in the arena, and the engine, which knows
what its cache still holds, asks for them where it does need them after all. So there is never a hole.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from common import tasks
from common.errors import TwinlensError
from llm_service.encoders.fetch import Fetch
from llm_service.encoders.landing import Landing
from llm_service.engine.front import EngineFront, Ticket
from llm_service.engine.messages import NOWHERE, ItemRows
from llm_service.request import Laid, MediaHeader, Request
from llm_service.rows import RowEntry, RowStore, Watcher


class MediaRows:
    """Owned by the request's task until it is submitted; then `release` is the engine's to call, and `leave` the
    task's. Entries come back with `release`, streams with `leave` or with the last entry of their rows."""

    def __init__(self, landing: Landing, store: RowStore, request: Request) -> None:
        self._landing = landing
        self._store = store
        self._request = request
        self._fetches: list[Fetch] = []
        self._unused: list[Fetch] = []
        self._entries: dict[int, RowEntry] = {}
        self._held: list[RowEntry] = []
        self._released = False
        self._watched: list[tuple[RowEntry, Watcher]] = []
        self._late: dict[int, asyncio.Task[None]] = {}

    async def introduce(self) -> list[MediaHeader]:
        """The headers of all items, in order; raises the error of the first item that has none."""
        if self._request.media:
            self._fetches = self._unused = await self._landing.introduce(self._request)
        return [await fetch.introduce() for fetch in self._fetches]

    async def take(self, covered: Collection[int]) -> None:
        """Room for the rows of every item, all at once, but of those in `covered` that are not here anyway."""
        covered = {item for item in covered if not self._landing.has_rows(self._fetches[item])}
        wanted = [item for item in range(len(self._fetches)) if item not in covered]
        await self._landing.close([self._fetches[item] for item in covered])
        self._landing.counters.covered += len(covered)
        self._unused = []
        entries = await self._landing.acquire(self._request, [self._fetches[item] for item in wanted])
        self._entries = dict(zip(wanted, entries, strict=True))
        self._held = list(entries)

    def items(self, laid: Laid) -> list[ItemRows]:
        """What the engine is told of each span."""
        found = []
        for span in laid.spans:
            entry = self._entries.get(span.item)
            runs = [(run.start, run.first_row, run.count) for run in span.runs]
            place, landed = (NOWHERE, 0) if entry is None else (entry.place.offset, entry.landed)
            found.append(ItemRows(span.header.key, place, runs, landed))
        return found

    def follow(self, engine: EngineFront, ticket: Ticket, laid: Laid, on_complete: Callable[[], None]) -> None:
        """Passes every landing on to the engine, brings what it asks for, and fails the request with its item."""

        def watcher(number: int) -> Watcher:
            def tell(entry: RowEntry) -> None:
                if entry.error is not None:
                    ticket.fail(entry.error)
                    return
                engine.landed(ticket.id, number, entry.landed)
                if all(other.complete for other in self._entries.values()):
                    on_complete()

            return tell

        def watch(number: int, entry: RowEntry) -> None:
            tell = watcher(number)
            entry.watchers.append(tell)
            self._watched.append((entry, tell))
            tell(entry)

        async def bring(number: int) -> None:
            try:
                entry = await self._bring(laid.spans[number].item)
            except TwinlensError as error:
                ticket.fail(error)
                return
            if not self._released:
                engine.placed(ticket.id, number, entry.place.offset, entry.landed)
                watch(number, entry)

        def want(numbers: Iterable[int]) -> None:
            for number in numbers:
                if number not in self._late:
                    self._late[number] = tasks.start(bring(number), "rows that the engine asked for")

        for number, span in enumerate(laid.spans):
            if (entry := self._entries.get(span.item)) is not None:
                watch(number, entry)
        ticket.on_wanted = want

    async def _bring(self, item: int) -> RowEntry:
        if item not in self._entries:
            (entry,) = await self._landing.acquire(self._request, [self._fetches[item]])
            self._landing.counters.covered -= 1
            self._entries[item] = entry
            if self._released:
                self._store.release(entry)
            else:
                self._held.append(entry)
        return self._entries[item]

    def release(self) -> None:
        """Gives every entry back, once: nobody reads them any more."""
        self._released = True
        while self._held:
            self._store.release(self._held.pop())

    async def abandon(self) -> None:
        """Gives everything back where the engine was never given the request."""
        self.release()
        await self._landing.close(self._unused)

    async def leave(self) -> None:
        """The request has ended for its caller: nothing more is passed on, or asked for."""
        for entry, tell in self._watched:
            entry.watchers.remove(tell)
        self._watched.clear()
        for task in self._late.values():
            task.cancel()
        await asyncio.gather(*self._late.values(), return_exceptions=True)

    def encoder_seconds(self) -> dict[str, float]:
        """What encoders spent on the items that this request brought in, by stage, summed over items."""
        total: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.brought_by == self._request.id:
                total.update({f"encoder_{stage}": seconds for stage, seconds in entry.timings.items()})
        return dict(total)
