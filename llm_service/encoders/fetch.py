"""One item's way in: its header, then its rows, over as many streams as it takes within bounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from time import monotonic

from common import log, tracing
from common.errors import (
    CALLER_STALLED,
    ENCODER_SLOW,
    LEASE_EXPIRED,
    MEDIA_CHANGED,
    MEDIA_HOST,
    DataLoss,
    Exhausted,
    NotFound,
    TwinlensError,
    Unavailable,
)
from common.media.item import Header, Key, Url
from common.stages import Stage, add
from llm_service.encoders.breaker import RetryBudget
from llm_service.encoders.choice import EncoderChoice
from llm_service.encoders.encoder_cache import CacheEntry, EncoderCache
from llm_service.encoders.header_cache import HeaderCache, KnownHeader
from llm_service.encoders.identity import Identity, given_by
from llm_service.encoders.parallel_streams import ParallelStreams, open_parallel
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.replica import Asking, Replica
from llm_service.encoders.stream import UNREACHABLE, EncodeStream
from llm_service.encoders.transports.base import MirrorPlace
from llm_service.request import MediaItem, Request

_log = log.get("fetch")
_ATTEMPTS = 3
_RETRIED = (Unavailable, DataLoss, Exhausted, NotFound)


@dataclass(slots=True)
class LinkCounters:
    """Totals since start; the contract's GetLoad says what each counts."""

    attempts: int = 0
    retries: int = 0
    headers_known: int = 0
    covered: int = 0


@dataclass(slots=True)
class Links:
    """What all fetches share. `patience` is how long one waits for room at encoders that are full, in seconds."""

    pool: EncoderPool
    patience: float
    header_cache: HeaderCache = field(default_factory=HeaderCache)
    budget: RetryBudget = field(default_factory=RetryBudget)
    counters: LinkCounters = field(default_factory=LinkCounters)


class Fetch:
    """An item of a request on its way in. Whoever makes it closes it; only one task uses it at a time.

    `stages` are what was done for it: `hash`, to compute its key; where it was this fetch that brought the rows,
    `landing`, and the encoder's own with `encoder_` before their names.
    """

    def __init__(
        self, links: Links, item: MediaItem, identity: Identity, request: Request, known: KnownHeader | None
    ) -> None:
        self.item = item
        self.header = None if known is None else known.header
        self._links = links
        self._identity = identity
        self.stages: dict[str, Stage] = {}
        self._affinity = identity.affinity if known is None else known.affinity
        self._request = request
        self._salt = request.salt
        self._asking = Asking(request_id=request.id, salt=request.salt, priority=request.priority)
        self._missing: NotFound | None = None
        self._failures = 0
        self._lapses = 0
        self._broke = False
        self._replica: Replica | None = None
        self._stream: EncodeStream | ParallelStreams | None = None
        self._opened = 0.0
        self._key_there = b""
        self._states_rows = False
        self._holds = ExitStack()
        patient_until = min(monotonic() + links.patience, request.deadline or float("inf"))
        self._choice = EncoderChoice(links.pool, self._affinity, request, item.field, patient_until)

    @property
    def has_content(self) -> bool:
        """The item came with its content: not by a key or an address, where somebody else has to have it."""
        return self._identity.key is not None and not isinstance(self.item.source, Key)

    @property
    def waits_for_room(self) -> bool:
        """Every encoder is full, as far as is known, and the item is with none."""
        return self._choice.waits

    @property
    def keeps_place(self) -> bool:
        """The header has come, and an encoder keeps a place for the item until its rows are read."""
        return self.header is not None and self._stream is not None

    def renewed(self) -> Fetch:
        """The same item to be fetched once more, whatever becomes of this fetch."""
        known = None if self.header is None else KnownHeader(self.header, self._affinity)
        return Fetch(self._links, self.item, self._identity, self._request, known)

    async def fetch_header(self, on_wait: Callable[[], None] = lambda: None) -> Header:
        """The item's header: known from before, or from the first stream that says it, which then stays open.

        Raises the item's error, or what kept every encoder from answering. `on_wait` is called when the item has to
        wait for room first; what it raises ends this.
        """
        if self.header is None:
            waits_alone, self._choice.on_wait = self._choice.on_wait, on_wait
            try:
                await self._persistently(self._open)
            finally:
                self._choice.on_wait = waits_alone
        else:
            self._links.counters.headers_known += 1
        assert self.header is not None
        return self.header

    async def fetch_rows(self, cache: EncoderCache, entry: CacheEntry) -> None:
        """Lands the rows of an entry that are missing; raises what kept them from coming."""
        # Not this request's time alone: others may share the rows.
        self._choice.patient_until = monotonic() + self._links.patience

        async def receive() -> None:
            if self._stream is None:
                await self._open(entry.landed)
            await self._parallelise(entry.landed, cache.layout.row_bytes)
            assert self._stream is not None
            missing, began = entry.header.tokens - entry.landed, time.perf_counter()
            ended = began
            mirror = MirrorPlace(entry.place.offset, lambda: cache.mirror(entry))
            try:
                async with aclosing(self._stream.rows(cache.view(entry), mirror)) as runs:
                    async for rows, transport in runs:
                        ended = time.perf_counter()  # what is told once all rows are here is none of their time
                        cache.advance(entry, rows, transport)
                        self._lapses = 0
            except TwinlensError:  # once all rows are here, how the stream ends is of no account
                if not entry.complete:
                    ended = time.perf_counter()
                    raise
            finally:
                add(self.stages, "landing", Stage.between(began, ended))
                tracing.record([("landing", began, ended)], rows=missing)
            self.stages |= {f"encoder_{name}": stage for name, stage in self._stream.stages.items()}

        await self._persistently(receive)
        self._links.pool.quarantine.clear(self._affinity)
        if self._replica is not None:
            self._replica.breaker.succeeded()

    def close(self) -> None:
        """Ends the stream that is open, if any, and the waiting for room. It waits for nothing, so that no cancellation
        can come between."""
        self._hang_up()
        self._choice.close()

    def _hang_up(self) -> None:
        self._stream = None
        self._holds.close()
        self._choice.ends()

    async def _persistently(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work` until it succeeds, or until `_after` says that it is no use."""
        while True:
            try:
                return await work()
            except _RETRIED as error:
                await self._after(error)

    async def _open(self, first: int = 0) -> None:
        """Opens a stream at an encoder and waits for its header."""
        links, choice = self._links, self._choice
        asking = dataclasses.replace(self._asking, first=first, attempt=len(choice.tried), broke=self._broke)
        self._replica = None
        self._replica = replica = await choice.next()
        links.counters.attempts += 1
        if not asking.attempt and not asking.broke:
            links.budget.earn()
        self._opened = replica.breaker.now()
        choice.asks()
        with tracing.span("header", encoder=replica.address, attempt=asking.attempt):
            self._stream = self._holds.enter_context(replica.encode(await replica.prepare(self._item(), asking)))
            header = await self._stream.header()
        choice.let_in()
        self._key_there = header.key
        if self._keeps_others(header):
            self._hang_up()
            choice.tried.pop()
            self._states_rows = True
            await self._open(first)
            return
        if self._states_rows and self.header is not None:
            header = dataclasses.replace(header, key=self.header.key)  # there, they have one of their own
        self._compare(header)
        self.header = header
        links.header_cache.remember(self._names(header), header, self._salt, self._affinity)

    async def _parallelise(self, first: int, row_bytes: int) -> None:
        """Has several streams bring the rows from `first` on in place of the one that is open, where that is better."""
        assert self._replica is not None
        assert self.header is not None
        with ExitStack() as parts:
            asking = dataclasses.replace(self._asking, first=first, broke=self._broke)
            there = dataclasses.replace(self.header, key=self._key_there)
            opened = await open_parallel(self._replica, self.item, asking, there, row_bytes, parts)
            if opened is not None:
                self._holds.close()
                self._stream, self._holds = opened, parts.pop_all()

    def _names(self, header: Header) -> set[bytes]:
        """What the header is to be known by: its key, and what the item is recalled by, if that says the same. Of an
        address it is how the next caller will ask, who states the key that this one is told."""
        if self._identity.key is None:
            return {header.key, given_by(self.item, header.key)}
        same = self._identity.key == header.key and self._identity.recalled is not None
        return {header.key, self._identity.recalled or b""} if same else {header.key}

    def _item(self) -> MediaItem:
        """What an encoder is asked for: once it is known what an address gives, it need not be fetched again."""
        if self.header is None:
            return self.item
        if self._states_rows:
            options = dataclasses.replace(self.item.options, video_pruning_rate=None, kept_rows=self.header.kept_rows)
            source = Url(self.item.source.address) if isinstance(self.item.source, Url) else self.item.source
            return dataclasses.replace(self.item, source=source, options=options)
        if not isinstance(self.item.source, Url):
            return self.item
        return dataclasses.replace(self.item, source=Url(self.item.source.address, self.header.key))

    def _keeps_others(self, header: Header) -> bool:
        """Of a pruned video, the encoder has kept other rows than those that we know: where two differ by rounding, so
        may what they choose. It is then told which. Of an item by its key alone, it cannot be."""
        known = self.header
        return (
            known is not None
            and bool(known.kept_rows)
            and not self._states_rows
            and not isinstance(self.item.source, Key)
            and known.key == header.key
            and known.kept_rows != header.kept_rows
        )

    def _compare(self, header: Header) -> None:
        """Two encoders, or an encoder and the bytes that we hold, must agree on what an item is."""
        if self._identity.key not in (None, header.key) or header.modality != self.item.modality:
            raise DataLoss("an encoder speaks of another item")
        if self.header is not None and dataclasses.replace(header, cached=self.header.cached) != self.header:
            self._links.header_cache.forget(self._names(self.header), self.header, self._salt)
            if self._identity.key is None:
                raise Unavailable(
                    "an address gives other media than before", reason=MEDIA_CHANGED, field=self.item.field
                )
            raise DataLoss("two encoders contradict each other on an item")

    async def _after(self, error: TwinlensError) -> None:
        """Returns where another stream is worth its while; else raises the error, or what it amounts to.

        A stream that breaks is opened again, on another encoder where there is one, from the first row that is missing:
        rows are the same wherever they are computed. An encoder that is full is passed over, or waited for where all
        are. What is the item's own fault is not tried again.
        """
        replica, heard = self._replica, self._stream is not None and self._stream.heard
        self._hang_up()
        if replica is None:  # none could be picked, and that was waited for
            raise self._missing if self._missing is not None and isinstance(error, Unavailable) else error
        if error.reason in (
            MEDIA_HOST,
            MEDIA_CHANGED,
            ENCODER_SLOW,
        ):  # it may be the item's doing, and no other can do better
            if error.reason == ENCODER_SLOW:
                replica.breaker.failed(self._opened)
            raise error
        if isinstance(error, NotFound):
            self._choice.lacks(replica)
            if not isinstance(self.item.source, Key) or not any(
                may.usable or may.unsure for may in self._choice.may_have()
            ):
                raise error
            self._missing = error
            return
        if isinstance(error, Exhausted):
            self._choice.refused(replica, error)
            return
        self._broke = True
        if error.reason in (LEASE_EXPIRED, CALLER_STALLED):
            # We were late, mostly since another item's header was: the encoder did well, and has the rows. It is asked
            # for them again, though not for ever where nothing at all arrives in time.
            self._lapses += 1
            if self._lapses >= _ATTEMPTS:
                raise error
            self._choice.tried.remove(replica.address)
            self._links.counters.retries += 1
            return
        replica.breaker.failed(self._opened)
        if isinstance(error, Unavailable):
            replica.health.suspect(self._affinity if heard and error.reason == UNREACHABLE else None)
        _log.info("stream broke", address=replica.address, request_id=self._asking.request_id, reason=error.reason)
        self._failures += 1
        if self._failures >= _ATTEMPTS:
            raise error
        if not self._links.budget.spend() and not (error.reason == UNREACHABLE and await replica.health.is_gone()):
            raise error
        self._links.counters.retries += 1
