"""One item's way in: its header, then its rows, over as many streams as it takes within bounds."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

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
from common.media.item import Header, Key
from common.telemetry import log, tracing
from common.telemetry.stages import Stage, add
from llm_service.encoders.attempt import Attempt, RowStream
from llm_service.encoders.breaker import RetryBudget
from llm_service.encoders.choice import EncoderChoice
from llm_service.encoders.encoder_cache import CacheEntry, EncoderCache
from llm_service.encoders.header_cache import HeaderCache
from llm_service.encoders.known_item import KnownItem
from llm_service.encoders.pace import FAR_LONGER
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncodeParams
from llm_service.encoders.stream import UNREACHABLE
from llm_service.encoders.transports.base import MirrorPlace
from llm_service.request import Request

T = TypeVar("T")

_log = log.get("fetch")
_ATTEMPTS = 3
_RETRIED = (Unavailable, DataLoss, Exhausted, NotFound)
_LOOK_SECONDS = 0.5
"""From one look whether an item is overdue to the next, at most."""


@dataclass(slots=True)
class FetchCounters:
    """Totals since start; see GetLoad in the contract."""

    attempts: int = 0
    retries: int = 0
    headers_known: int = 0
    covered: int = 0


@dataclass(slots=True)
class FetchContext:
    """What all fetches share. `patience` is how long an item waits for room at full encoders, in seconds."""

    pool: EncoderPool
    patience: float
    header_cache: HeaderCache = field(default_factory=HeaderCache)
    budget: RetryBudget = field(default_factory=RetryBudget)
    counters: FetchCounters = field(default_factory=FetchCounters)


class Fetch:
    """Fetches an item of a request. Its creator closes it; only one task uses it at a time.

    `stages` are those of the item: `hash`, computing its key; if this fetch brought the rows, `landing`, and the
    encoder's own stages with the prefix `encoder_`.
    """

    def __init__(self, context: FetchContext, known: KnownItem, request: Request) -> None:
        self.known, self.item = known, known.item
        self._context = context
        self.stages: dict[str, Stage] = {}
        self._request = request
        self._params = EncodeParams(request_id=request.id, salt=request.salt, priority=request.priority)
        self._missing: NotFound | None = None
        self._failures = 0
        self._lapses = 0
        self._broke = False
        self._attempt: Attempt | None = None
        self._hedged: set[str] = set()  # the parts for which another encoder was asked as well
        patient_until = min(monotonic() + context.patience, request.deadline or float("inf"))
        self._choice = EncoderChoice(context.pool, known.affinity, request, known.item.field, patient_until)

    @property
    def header(self) -> Header | None:
        """The item's, once it is known."""
        return self.known.header

    @property
    def waits_for_room(self) -> bool:
        """Every encoder is full, as far as is known, and the item is with none."""
        return self._choice.is_waiting

    @property
    def keeps_place(self) -> bool:
        """The header has come, and an encoder keeps a place for the item until its rows are read."""
        return self.header is not None and self._attempt is not None

    def renewed(self) -> Fetch:
        """A new fetch of the same item, independent of this one."""
        return Fetch(self._context, self.known.renewed(), self._request)

    async def fetch_header(self, on_wait: Callable[[], None] = lambda: None) -> Header:
        """The item's header: already known, or from the first stream that tells it, which stays open.

        Raises the item's error, or the reason why no encoder answered. `on_wait` is called if the item must wait for
        room first; its errors end this.
        """
        if self.header is None:
            waits_alone, self._choice.on_wait = self._choice.on_wait, on_wait
            try:
                await self._persistently(self._open)
            finally:
                self._choice.on_wait = waits_alone
        else:
            self._context.counters.headers_known += 1
        assert self.header is not None
        return self.header

    async def fetch_rows(self, cache: EncoderCache, entry: CacheEntry) -> None:
        """Fetches the missing rows of an entry; raises the reason if that fails."""
        # Not this request's time alone: others may share the rows.
        self._choice.patient_until = monotonic() + self._context.patience

        async def receive() -> None:
            while not entry.complete:
                if self._attempt is None:
                    await self._open(entry.landed)
                await self._land(cache, entry)
                if not entry.complete:
                    self._hang_up()

        await self._persistently(receive)
        self._context.pool.quarantine.clear(self.known.affinity)
        if (attempt := self._attempt) is not None:
            self.stages |= {f"encoder_{name}": stage for name, stage in attempt.stages.items()}
            attempt.replica.breaker.succeeded()
            if attempt.header is not None and not attempt.header.cached:
                self._context.pool.learn(attempt.replica, attempt.longest_wait, entry.header.grid.patches)

    async def _land(self, cache: EncoderCache, entry: CacheEntry) -> None:
        """Lands the missing rows, or those that come before another encoder is to be asked for the rest."""
        missing, began = entry.header.tokens - entry.landed, time.perf_counter()
        ended = began
        first_rows = partial(self._first_rows, first=entry.landed, row_bytes=cache.layout.row_bytes)
        mirror = MirrorPlace(entry.place.offset, lambda: cache.mirror(entry))
        try:
            stream = await self._race(first_rows)
            async with aclosing(stream.rows(cache.view(entry), mirror)) as runs:
                async for rows, transport in runs:
                    if rows:
                        ended = time.perf_counter()  # the remaining messages do not count as transfer time
                        cache.advance(entry, rows, transport)
                        self._lapses = 0
                    elif not entry.complete and self._is_stalled():
                        return
        except TwinlensError:  # once all rows are here, how the stream ends is of no account
            if not entry.complete:
                ended = time.perf_counter()
                raise
        finally:
            add(self.stages, "landing", Stage.between(began, ended))
            tracing.record([("landing", began, ended)], rows=missing)

    def close(self) -> None:
        """Ends the stream that is open, if any, and the waiting for room. It waits for nothing, so that no cancellation
        can come between."""
        self._hang_up()
        self._choice.close()

    def _hang_up(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()
        self._choice.on_done()

    async def _persistently(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work` until it succeeds, or until `_after` says that it is no use."""
        while True:
            try:
                return await work()
            except _RETRIED as error:
                await self._after(error)

    async def _open(self, first: int = 0) -> None:
        """Opens a stream at an encoder and waits for its header."""
        context, choice = self._context, self._choice
        number = len(choice.tried)
        replica = await choice.next()
        if not number and not self._broke:
            context.budget.earn()
        own = self._attempt = Attempt(replica, number)
        choice.on_sending()
        header = await self._race(partial(self._fetch_header, first=first))
        if self._attempt is own:
            del choice.tried[number + 1 :]  # the other encoder may still be asked for the rows
        self.known.learn(header)

    async def _fetch_header(self, attempt: Attempt, first: int) -> Header:
        """The encoder's header of the item, which must agree with what is known."""
        header = await self._ask(attempt, first)
        if self.known.keeps_others(header):
            self.known.state_rows()
            header = await self._ask(attempt, first)
        return self.known.checked(header)

    async def _ask(self, attempt: Attempt, first: int) -> Header:
        self._context.counters.attempts += 1
        params = self._params_of(attempt, first)
        with tracing.span("header", encoder=attempt.replica.address, attempt=attempt.number):
            header = await attempt.open(self.known.asked, params)
        self._choice.on_accepted()
        return header

    def _params_of(self, attempt: Attempt, first: int) -> EncodeParams:
        late = self._lapses >= _ATTEMPTS - 1
        return dataclasses.replace(self._params, first=first, attempt=attempt.number, broke=self._broke, late=late)

    async def _first_rows(self, attempt: Attempt, first: int, row_bytes: int) -> RowStream:
        """Delivers the rows from `first` on, once there are any; by several streams if that is better."""
        if attempt.stream is None:
            await self._fetch_header(attempt, first)
        assert self.header is not None
        await attempt.parallelise(self.item, self._params_of(attempt, first), self.header, row_bytes)
        return await attempt.first_rows()

    async def _race(self, work: Callable[[Attempt], Coroutine[Any, Any, T]]) -> T:
        """The result of `work` for the current attempt or, once that is overdue, for a second attempt at another
        encoder. The first to finish stays, and the other is closed. If one fails, the other continues alone, unless the
        item is at fault."""
        assert self._attempt is not None
        race = {asyncio.create_task(work(self._attempt), name="ask an encoder"): self._attempt}
        look = min(_LOOK_SECONDS, self._context.pool.settings.hedge / 4) or None
        try:
            while not self._is_won(race):
                began = monotonic()
                done, _ = await asyncio.wait(race, timeout=look, return_when=asyncio.FIRST_COMPLETED)
                late = look is not None and monotonic() - began > 2 * look  # what came meanwhile is to be read first
                if not (done or late or len(race) > 1) and (other := self._hedge(self._attempt)) is not None:
                    race[asyncio.create_task(work(other), name="ask another encoder")] = other
            return next(task for task, attempt in race.items() if attempt is self._attempt).result()
        finally:
            await _end(race, self._attempt)

    def _is_won(self, race: dict[asyncio.Task[T], Attempt]) -> bool:
        """Whether one of these attempts has ended the race; the fetch continues with it."""
        for task in [task for task in race if task.done()]:
            attempt, error = race[task], task.exception()
            if len(race) > 1 and error is not None and self._leaves_to_other(attempt, error, race.values()):
                del race[task]
                continue
            self._attempt = attempt
            return True
        return False

    def _leaves_to_other(self, attempt: Attempt, error: BaseException, both: Iterable[Attempt]) -> bool:
        """Whether an error of one of two attempts leaves the item to the other, which then is the only one."""
        own = attempt is self._attempt
        if isinstance(error, _RETRIED):
            with suppress(Exhausted):
                self._charge(attempt, error, begun=attempt.begun)
                if isinstance(error, Exhausted) and not own:  # then it was no try
                    self._take_back(attempt)
        elif own or not isinstance(error, TwinlensError):
            return False
        (self._attempt,) = (each for each in both if each is not attempt)
        attempt.close()
        self._choice.on_going_on(self._attempt.replica)
        return True

    def _take_back(self, hedge: Attempt) -> None:
        assert self._attempt is not None
        self._hedged.discard(self._attempt.owes)
        self._choice.tried.remove(hedge.replica.address)
        self._context.budget.give_back()
        self._context.counters.retries -= 1

    def _hedge(self, own: Attempt) -> Attempt | None:
        """A second attempt, beside one that is overdue, at an encoder that would have finished long ago."""
        waited, pace = own.waited, own.replica.pace
        if waited < self._context.pool.settings.hedge and not (waited and pace.is_slow_since(own.opened)):
            return None
        if (replica := self._elsewhere(own, waited)) is None:
            return None
        number = len(self._choice.tried)
        self._choice.tried.append(replica.address)
        return Attempt(replica, number)

    def _is_stalled(self) -> bool:
        """Whether to give up an encoder from which no more rows come, for another one that would have brought the rest
        long ago. Both at once cannot write to the item's place, and what this one has computed is lost: so it must take
        far longer than for any row before."""
        own, hedge = self._attempt, self._context.pool.settings.hedge
        assert own is not None
        waited = own.waited
        overdue = 0 < hedge <= waited and waited >= FAR_LONGER * own.longest_wait
        return overdue and self._elsewhere(own, waited) is not None

    def _elsewhere(self, own: Attempt, waited: float) -> Replica | None:
        """An encoder at which an item would wait far less than it has waited at its own, which is marked slow. Another
        encoder is asked once for the header, before which no device has the item, and once for its rows. This spends a
        retry, and is not done for items that may be deadly, or are only at their own encoder."""
        context = self._context
        if (
            own.owes in self._hedged
            or isinstance(self.item.source, Key)
            or context.pool.is_suspect(self.known.affinity)
        ):
            return None
        patches = 0 if self.header is None else self.header.grid.patches
        replica = self._choice.another(lambda replica: FAR_LONGER * replica.expected(patches) <= waited)
        if replica is None or not context.budget.spend():
            return None
        self._hedged.add(own.owes)
        context.counters.retries += 1
        if own.replica.pace.on_overdue():
            _log.warning(
                "an encoder is slow, and gets no items while others have room",
                address=own.replica.address,
                waited_seconds=round(waited, 1),
            )
        return replica

    async def _after(self, error: TwinlensError) -> None:
        """Returns if another stream is worthwhile; else raises the error, or what it means for the caller.

        A broken stream is reopened, on another encoder if there is one, from the first missing row: rows are equal
        wherever they are computed. A full encoder is skipped, or waited for if all are full. Errors of the item itself
        are final.
        """
        attempt = self._attempt
        if attempt is None:  # none could be picked, and that was waited for
            self._hang_up()
            raise self._missing if self._missing is not None and isinstance(error, Unavailable) else error
        replica, begun = attempt.replica, attempt.begun
        self._hang_up()
        self._charge(attempt, error, begun=begun)
        if error.reason in (MEDIA_HOST, MEDIA_CHANGED):  # it is the item's doing, and no other can do better
            raise error
        if error.reason == ENCODER_SLOW:  # the item may be the cause as well
            if self._elsewhere(attempt, self._context.pool.settings.timeout) is None:
                raise error
            self._broke = True
            return
        if isinstance(error, NotFound):
            if not isinstance(self.item.source, Key) or not any(
                may.usable or may.unsure for may in self._choice.candidates()
            ):
                raise error
            self._missing = error
            return
        if isinstance(error, Exhausted):
            return
        self._broke = True
        if error.reason in (LEASE_EXPIRED, CALLER_STALLED):
            # We were late, usually because another item's header was: the encoder did well, and has the rows. It is
            # asked again, though not forever if nothing arrives in time.
            self._lapses += 1
            if self._lapses >= _ATTEMPTS:
                raise error
            self._choice.tried.remove(replica.address)
            self._context.counters.retries += 1
            return
        _log.info("stream broke", address=replica.address, request_id=self._params.request_id, reason=error.reason)
        self._failures += 1
        if self._failures >= _ATTEMPTS:
            raise error
        if not self._context.budget.spend() and not (error.reason == UNREACHABLE and await replica.health.is_gone()):
            raise error
        self._context.counters.retries += 1

    def _charge(self, attempt: Attempt, error: TwinlensError, *, begun: bool) -> None:
        """Records the end of an attempt for its encoder, which had perhaps `begun` on the item. Raises Exhausted if the
        item never fits."""
        replica = attempt.replica
        if isinstance(error, NotFound):
            self._choice.exclude(replica)
        elif isinstance(error, Exhausted):
            self._choice.on_full(replica, error)
        elif error.reason not in (MEDIA_HOST, MEDIA_CHANGED, LEASE_EXPIRED, CALLER_STALLED):
            replica.breaker.failed(attempt.opened)
            if isinstance(error, Unavailable) and error.reason != ENCODER_SLOW:
                replica.health.suspect(self.known.affinity if begun and error.reason == UNREACHABLE else None)


async def _end(race: dict[asyncio.Task[T], Attempt], but: Attempt | None) -> None:
    """Ends all attempts except one. Leaves no references behind: a raised error would keep itself alive."""
    for task in race:
        task.cancel()
    await asyncio.gather(*race, return_exceptions=True)
    for attempt in race.values():
        if attempt is not but:
            attempt.close()
    race.clear()
