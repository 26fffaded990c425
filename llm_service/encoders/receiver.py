"""Brings a request's media into the row arena: headers first, so that the prompt can be laid out, then rows.

Filling an entry is not tied to the request that began it, since others may wait for the same rows: its deadline does
not bound the stream; when it ends, and nobody else waits, the stream is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from common.errors import (
    MEDIA_CHANGED,
    MEDIA_HOST,
    Forbidden,
    Internal,
    NotFound,
    Precondition,
    TwinlensError,
    without_traces,
)
from common.media.item import Header
from common.telemetry import tracing
from common.telemetry.stages import Stage
from llm_service.encoders.breaker import RetryBudget
from llm_service.encoders.encoder_cache import CacheEntry, EncoderCache
from llm_service.encoders.fetch import Fetch, FetchContext, FetchCounters
from llm_service.encoders.header_cache import KnownHeader
from llm_service.encoders.item_identity import Identity, identify
from llm_service.encoders.known_item import KnownItem
from llm_service.encoders.pool import EncoderPool
from llm_service.request import MediaItem, Request

_HEADER_SECONDS = 1.0
"""How long items of a request keep places at encoders while one header is missing, which may be a download."""


class RowReceiver:
    """Fills entries of the encoder cache from encoders. `patience` is how long an item waits for room at full encoders,
    `budget` bounds retries; items wait `header_seconds` for each other's headers before they leave their places."""

    def __init__(
        self,
        pool: EncoderPool,
        cache: EncoderCache,
        patience: float,
        budget: RetryBudget | None = None,
        header_seconds: float = _HEADER_SECONDS,
    ) -> None:
        self._header_seconds = header_seconds
        self._context = FetchContext(pool, patience, budget=budget or RetryBudget())
        self.cache = cache
        self._others: dict[CacheEntry, Fetch | None] = {}
        """Entries being filled by a key or an address alone, with the fetch of a caller who brought the content."""
        self._early: dict[Fetch, CacheEntry] = {}
        """Entries that are here before their request has all of its headers, for the fetch that stands for each."""

    @property
    def counters(self) -> FetchCounters:
        """Totals since start."""
        return self._context.counters

    async def acquire(
        self,
        fetches: Sequence[Fetch],
        give_back: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[CacheEntry]:
        """Entries for these items of one request, whose rows arrive in the background; waits until all have room.

        The fetches are consumed. The caller owns the entries and releases each once. `give_back` releases what the
        caller holds already: it is called before any waiting, but after entries that are here have been taken again, so
        that rows on their way continue. `on_wait` is called if rows or room must be waited for, and may raise.
        """
        try:
            for fetch in fetches:
                if (early := self._early.get(fetch)) is not None and early.error is not None and not early.lost:
                    raise early.error_at(fetch.item.field)
            entries = await self._room(fetches, give_back, on_wait)
        except BaseException:
            self.close(fetches)
            raise
        for fetch, entry in zip(fetches, entries, strict=True):
            if self._early.get(fetch) is entry:
                self.cache.counters.hits -= 1  # it is this request that brings them
            self._give_up_early(fetch)
            self._fill_by(fetch, entry)
        return entries

    def _fill_by(self, fetch: Fetch, entry: CacheEntry) -> None:
        """Has a fetch land the rows of an entry, unless they are here or on their way; it is used up."""
        if entry.filler is None:
            entry.stood_at = fetch.item.field
            entry.filler = self._start_filler(entry, fetch)
            return
        fetch.close()  # its rows are here, or another stream brings them
        if entry in self._others and fetch.known.has_content:
            self._others[entry] = fetch.renewed()

    def _start_filler(self, entry: CacheEntry, fetch: Fetch) -> asyncio.Task[None]:
        """The task that fetches an entry's rows; its stream is closed even if it is cancelled before it starts."""
        filler = asyncio.create_task(self._fill(entry, fetch), name="fill rows")
        if not fetch.known.has_content:
            self._others[entry] = None

        def ended(task: asyncio.Task[None]) -> None:
            fetch.close()
            self._others.pop(entry, None)
            if task.cancelled():  # the task keeps the exception, whose frames hold the item's content and the entry
                with contextlib.suppress(asyncio.CancelledError):
                    task.result()

        filler.add_done_callback(ended)
        return filler

    async def fetch_headers(self, request: Request, on_wait: Callable[[], None] = lambda: None) -> list[Fetch]:
        """A fetch for each item, with its header; those whose header had to be requested have an open stream.

        The caller passes them to `acquire`, or to `close`. Raises the error of the first item that fails. `on_wait` is
        called before an encoder is asked, and may raise.
        """
        fetches: list[Fetch | None] = [None] * len(request.media)
        late = False

        def let_others_go_on() -> None:
            is_late = late and any(fetch is None or fetch.header is None for fetch in fetches)
            if is_late or any(fetch is not None and fetch.waits_for_room for fetch in fetches):
                for index, fetch in enumerate(fetches):
                    if fetch is not None and fetch.keeps_place:
                        fetches[index] = self._leave_place(fetch)

        async def fetch_header(item: MediaItem) -> None:
            began = time.perf_counter()
            identity = await identify(item, self._context.pool.settings.digest, request.salt)
            ended = time.perf_counter()
            tracing.record([("hash", began, ended)], item=item.index)
            recalled = self._recall(item, identity, request.salt)
            known = KnownItem(item, identity, recalled, self._context.header_cache, request.salt)
            fetch = fetches[item.index] = Fetch(self._context, known, request)
            fetch.stages["hash"] = Stage.between(began, ended)
            if recalled is None:
                on_wait()
            await fetch.fetch_header(let_others_go_on)
            let_others_go_on()

        try:
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(fetch_header(item)) for item in request.media]
                if asking:
                    _, missing = await asyncio.wait(asking, timeout=self._header_seconds)
                    late = bool(missing)
                    let_others_go_on()
        except BaseException as error:
            self.close([fetch for fetch in fetches if fetch is not None])
            if isinstance(error, ExceptionGroup):
                raise next(iter(error.exceptions)) from error
            raise
        return [fetch for fetch in fetches if fetch is not None]

    def _leave_place(self, fetch: Fetch) -> Fetch:
        """Has an item with a header keep its place at an encoder no longer than the encoder needs; returns the fetch
        that replaces it.

        This is for requests with another item that waits for a place, or whose header is late: requests that keep
        places while they wait for more would wait for each other, and all others for a download.
        """
        # The rows are read before the request's last header has come, if they have room: nothing is transferred twice
        # then, and the place is free once the encoder has computed them.
        if (following := self._read_early(fetch)) is not None:
            return following
        # Without room here, the place can only be given up: the item is sent again later, and computed again if the
        # encoder had not begun it, or no longer has its rows.
        fetch.close()
        return fetch

    async def leave_places(self, fetches: list[Fetch]) -> None:
        """Has items leave their places at encoders while something else of their request takes longer than they would
        wait for each other's headers: as soon as their rows have room here, these are read, and stay as cache, which
        keeps no room from others. Until then they stay at encoders, where another service may need them. Replaces
        fetches in the list, which nobody else may use."""
        while any(fetch.keeps_place or fetch in self._early for fetch in fetches):
            await asyncio.sleep(self._header_seconds)
            fetches[:] = [(fetch.keeps_place and self._read_early(fetch)) or fetch for fetch in fetches]
            for fetch in fetches:
                if (entry := self._early.get(fetch)) is not None and entry.complete:
                    self._give_up_early(fetch)

    def _read_early(self, fetch: Fetch) -> Fetch | None:
        """Has the rows of an item with a header read before its request needs them, if they have room. Returns the
        fetch that replaces it."""
        assert fetch.header is not None
        entries = self.cache.acquire_now([fetch.header])
        if entries is None:
            return None
        (entry,) = entries
        following = fetch.renewed()
        following.stages = fetch.stages
        self._early[following] = entry
        self._fill_by(fetch, entry)
        return following

    def _give_up_early(self, fetch: Fetch) -> None:
        if (entry := self._early.pop(fetch, None)) is not None:
            self.cache.release(entry)

    def _recall(self, item: MediaItem, identity: Identity, salt: str) -> KnownHeader | None:
        """What is known of an item from before. For an address it is used only if an encoder has confirmed it for this
        address (others may refuse it), and if the rows are here: if they had to be fetched again, the address might
        give something else by then."""
        known = self._context.header_cache.find(identity.recalled, salt, item.modality)
        if known is None or (identity.key is None and not self.cache.knows(known.header.rows_key)):
            return None
        return known

    async def _room(
        self, fetches: Sequence[Fetch], give_back: Callable[[], None], on_wait: Callable[[], None]
    ) -> list[CacheEntry]:
        """Room for all items. If it must be waited for, no stream stays open: an encoder keeps nothing for a caller who
        does not read."""
        wanted = headers_of(fetches)
        if not all(self.cache.holds(header.rows_key) for header in wanted):
            on_wait()
        entries = self.cache.acquire_now(wanted)
        give_back()
        if entries is not None:
            return entries
        on_wait()
        self.close(fetches)
        return await self.cache.acquire(wanted)

    async def _fill(self, entry: CacheEntry, fetch: Fetch) -> None:
        """Lands every row of an entry, or says why not."""
        try:
            await self._fetch_rows(entry, fetch)
        except TwinlensError as error:
            self.cache.forget(entry)
            entry.fail(without_traces(error))  # frames of this lead to the item's content, and back to the entry
        finally:
            if not entry.complete and entry.error is None:  # nobody may wait for rows that no task brings
                self.cache.forget(entry)
                entry.fail(Internal("the rows of an item could not be received"))

    async def _fetch_rows(self, entry: CacheEntry, fetch: Fetch) -> None:
        """By this fetch or, if its key or address has failed, by that of a caller who has brought the content."""
        try:
            await fetch.fetch_rows(self.cache, entry)
        except TwinlensError as error:
            if not _is_of_the_source(error) or (other := self._others.get(entry)) is None:
                raise
            fetch.close()
            with contextlib.closing(other):
                await other.fetch_rows(self.cache, entry)
            fetch.stages |= other.stages

    def close(self, fetches: Iterable[Fetch]) -> None:
        """Closes their streams; encoders drop what they have not begun and nobody else wants."""
        for fetch in fetches:
            self._give_up_early(fetch)
            fetch.close()


def _is_of_the_source(error: TwinlensError) -> bool:
    """Whether the error only says that the item is not available where it was to be found."""
    gone = isinstance(error, NotFound | Forbidden | Precondition)
    return gone or error.reason in (MEDIA_HOST, MEDIA_CHANGED, "MEDIA_HOST_SLOW", "FETCHES_BUSY")


def headers_of(fetches: Sequence[Fetch]) -> list[Header]:
    """The headers of items that are known."""
    return [fetch.header for fetch in fetches if fetch.header is not None]
