"""The rows of one request's media, from their headers until the engine has read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

from common.aio import tasks
from common.errors import TwinlensError
from common.media.item import Header
from common.telemetry.stages import Stage, add
from llm_service.encoders.encoder_cache import CacheEntry, Watcher
from llm_service.encoders.fetch import Fetch
from llm_service.encoders.receiver import RowReceiver, headers_of
from llm_service.engine.messages import NOWHERE, Add, ItemRows
from llm_service.engine_client.client import EngineClient
from llm_service.engine_client.engine_request import EngineRequest
from llm_service.request import PromptLayout


def rows_of(layout: PromptLayout, places: Sequence[tuple[int, int]]) -> list[ItemRows]:
    """The spans for the engine, with these (offset, rows that have arrived)."""
    return [
        ItemRows(span.header.rows_key, place, span.runs, landed)
        for span, (place, landed) in zip(layout.spans, places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A request that the engine has, and the function to call when all its rows have arrived."""

    engine: EngineClient
    request: EngineRequest
    on_complete: Callable[[], None]


class MediaRows:
    """A context of the request's task, around `take` and then `submit`. Everything taken is given back on every way
    out: by the engine once it has the request and no longer reads its rows, otherwise at the end of the context.

    `fetches` are those of the request's items, in order, with their headers.
    """

    def __init__(self, receiver: RowReceiver, fetches: Sequence[Fetch]) -> None:
        self._receiver = receiver
        self._cache = receiver.cache
        self._fetches = list(fetches)
        self._used = list(fetches)
        self._entries: dict[int, CacheEntry] = {}
        self._layout = PromptLayout([], [])
        self._submitted: _Submitted | None = None
        self._taken = self._released = False
        self._covered = 0
        self._watched: list[tuple[CacheEntry, Watcher]] = []
        self._placing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The request has ended for its caller: nothing more is passed on, or placed."""
        if self._submitted is None:
            self.released()
            if not self._taken:  # otherwise the entries that they fill own the streams
                self._receiver.close(self._fetches)
            return
        self._unwatch()
        self._submitted.request.leave()
        self._submitted = None  # otherwise each would hold the other
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.gather(self._placing, return_exceptions=True)

    @property
    def headers(self) -> list[Header]:
        """Those of all items, in order."""
        return headers_of(self._fetches)

    @property
    def all_here(self) -> bool:
        """Whether all rows with reserved room have arrived."""
        return all(entry.complete for entry in self._entries.values())

    @asynccontextmanager
    async def at_encoders(self) -> AsyncGenerator[None]:
        """For waiting for another service, before `take`: if that takes long, items keep no places at encoders, as far
        as their rows have room here. The other service may be waiting for just these places.

        Raises InvalidInput if the rows of all items can never fit together.
        """
        self._cache.check_size(self.headers)
        leaving = tasks.start(self._receiver.leave_places(self._fetches), "leave places at encoders")
        try:
            yield
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def take(
        self, layout: PromptLayout, covered: Collection[int], on_wait: Callable[[], None] = lambda: None
    ) -> list[ItemRows]:
        """Takes room for the rows of all items together, except those `covered` by the prefix cache whose rows are not
        here anyway. Returns the spans for the engine.

        Covered items have no place in the arena. If the engine needs their rows after all, because the cache has lost
        their blocks, it asks for them; so there is never a hole.

        Raises InvalidInput if the rows of all items can never fit together. `on_wait` is called if rows or room must be
        waited for, and may raise.
        """
        self._layout = layout
        headers = self.headers
        self._cache.check_size(headers)
        covered = {item for item in covered if not self._cache.knows(headers[item].rows_key)}
        self._receiver.close([self._fetches[item] for item in covered])
        self._covered = len(covered)
        self._receiver.counters.covered += self._covered
        self._taken = True
        await self._acquire([item for item in range(len(self._fetches)) if item not in covered], on_wait)
        return rows_of(layout, self._places())

    def submit(
        self, engine: EngineClient, add: Add, on_complete: Callable[[], None], max_handovers: int = 0
    ) -> EngineRequest:
        """Submits the request to the engine, which reports when rows may be released: when the prompt is computed,
        unless it asks for them again. Each row that arrives is reported to the engine, items that it asks for are given
        places, and the request fails with its items. `on_complete` is called when all rows are here."""
        request = engine.submit(add, self, max_handovers)
        self._submitted = _Submitted(engine, request, on_complete)
        self._watch(self._submitted)
        return request

    def rows_needed(self) -> None:
        """The engine asks for places, if it has not heard yet that the request has ended."""
        if self._submitted is not None and (self._placing is None or self._placing.done()):
            self._placing = tasks.start(self._place_again(self._submitted), "rows that the engine asked for")

    def rows_read(self) -> None:
        """The engine has read all rows. The items' content stays, and counts in the request budget, until the request
        ends: if it is preempted, or its engine ends, it asks for its rows again, and an encoder that has evicted them
        makes them of that."""
        self._unwatch()
        self._give_back()

    async def _place_again(self, submitted: _Submitted) -> None:
        try:
            await self._place()
            while any(entry.lost for entry in self._entries.values()):
                await self._place()  # another engine has ended meanwhile
        except TwinlensError as error:
            submitted.request.fail(error)
            return
        submitted.engine.placed(submitted.request.id, self._places())
        self._watch(submitted)

    def _watch(self, submitted: _Submitted) -> None:
        """Reports how many rows of each item have arrived, now and whenever more do."""
        for number, span in enumerate(self._layout.spans):
            if (entry := self._entries.get(span.item)) is not None:
                tell = partial(self._tell, submitted, number, self._fetches[span.item].item.field)
                entry.watchers.append(tell)
                self._watched.append((entry, tell))
                tell(entry)

    def _tell(self, submitted: _Submitted, number: int, field: str, entry: CacheEntry) -> None:
        """Reports the state of the rows of span `number`; `field` is where the request has the item."""
        request = submitted.request
        if entry.lost and not request.held and not request.over:
            request.rows_needed()
            return
        if entry.error is not None:
            request.fail(entry.error_at(field))
            return
        submitted.engine.landed(request.id, number, entry.landed)
        if self.all_here:
            submitted.on_complete()

    def _places(self) -> list[tuple[int, int]]:
        """(offset, rows that have landed) of each span's item."""
        entries = [self._entries.get(span.item) for span in self._layout.spans]
        return [(NOWHERE, 0) if entry is None else (entry.place.offset, entry.landed) for entry in entries]

    async def _place(self) -> None:
        """Takes places for all items together, after the engine has forgotten the earlier ones. All that this request
        holds is given back before it waits, so no two requests can block each other."""
        self._unwatch()
        self._receiver.counters.covered -= self._covered
        self._covered = 0
        self._fetches = [fetch.renewed() for fetch in self._fetches]
        self._used.extend(self._fetches)
        await self._acquire(list(range(len(self._fetches))))
        if self._released:
            self._give_back()

    async def _acquire(self, items: list[int], on_wait: Callable[[], None] = lambda: None) -> None:
        entries = await self._receiver.acquire([self._fetches[item] for item in items], self._give_back, on_wait)
        self._entries |= dict(zip(items, entries, strict=True))

    def _give_back(self) -> None:
        while self._entries:
            self._cache.release(self._entries.popitem()[1])

    def _unwatch(self) -> None:
        for entry, tell in self._watched:
            entry.watchers.remove(tell)
        self._watched.clear()

    def released(self) -> None:
        """Releases every entry: nobody reads the rows any more."""
        self._released = True
        self._give_back()

    def stages(self) -> dict[str, Stage]:
        """The stages that this service and the encoders spent on all items together; encoders' stages and transfers
        count only for items that this request fetched."""
        found: dict[str, Stage] = {}
        for fetch in self._used:
            for name, stage in fetch.stages.items():
                add(found, name, stage)
        return found
