"""The embedding store: computed rows by content key, in one arena, under a byte budget."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.aio.tasks import in_thread
from common.errors import InvalidInput
from common.media.item import Header
from common.shm import eviction
from common.shm.arena import Range, SharedBuffer, aligned
from common.shm.evicting_ranges import EvictingRanges
from encoder_service.engine.device_pool import Slice

_PART = 256 << 20
"""Bytes returned to the system at a time."""

_AT_ONCE = 1024
"""Entries that are flushed in one turn of the loop: of many thousands all together take a second or more."""

_SEARCHES = 4
"""Searches of the store for the first waiter, after which room is reserved for it. Each takes milliseconds of the loop
with ten thousand entries, and there is one for each turn of the loop in which something was freed."""

_UNWRITTEN = 1 << 20
"""Rows that are still being written count as so many readers, so that other ranges are reserved rather than theirs."""


@dataclass(slots=True, eq=False)
class Allocation:
    """Room for one item's rows, allocated before anything is computed, and pinned by everyone who writes or reads them.

    It is `kept` once an entry has it: without pins it is then evictable instead of free. `copies` are copies of its
    rows in device pools, by the first row of each; some may have been evicted.
    """

    span: Range
    pins: int = 1
    kept: bool = False
    copies: dict[int, Slice] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Entry:
    """Rows of one item: header, owner, place, and a counter of their last use."""

    header: Header
    salt: bytes
    allocation: Allocation

    @property
    def span(self) -> Range:
        """Their byte range in the arena."""
        return self.allocation.span

    @property
    def pins(self) -> int:
        """Number of readers."""
        return self.allocation.pins


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    future: asyncio.Future[Allocation]
    searches: int = 0


@dataclass(slots=True, eq=False)
class _Reservation:
    """Adjacent ranges that become one waiter's room when their `holders`, which read or write there, are gone."""

    span: Range
    waiter: _Waiter
    holders: set[Allocation]


class EmbeddingStore:
    """Rows of `row_bytes` each in `buffer`, indexed by key. `shrink` returns memory to the system by `part` bytes,
    unless the buffer is `registered`: a network card would keep reading the old pages.

    Entries are kept and evicted whole, and never while pinned: the least recently used first or, if that alone makes no
    room, adjacent ones none of which was used lately (`EvictingRanges`). Rows may be read as soon as they are written,
    before their entry is complete: whoever pins an allocation must unpin it, and nobody else gets its bytes before,
    even if the rest of the rows never comes.

    Allocations that find no room wait, first come, first served. Since hits pin entries all the time, a large one might
    never find adjacent entries without readers; so after a few searches adjacent ranges are reserved for it. Their
    entries are dropped: nobody new reads them, and their items are computed again on demand, while current readers
    go on. There is one reservation at a time; later waiters are served from what is not reserved.
    """

    def __init__(self, buffer: SharedBuffer, row_bytes: int, *, part: int = _PART, registered: bool = False) -> None:
        self.buffer = buffer
        self._row_bytes = row_bytes
        self._part = part
        self._registered = registered
        self._ranges: EvictingRanges[Entry] = EvictingRanges(buffer.size, evict=self._drop)
        self._entries: dict[bytes, Entry] = {}
        self._unkept: set[Allocation] = set()  # allocations without an entry
        self._waiters: deque[_Waiter] = deque()
        self._reservation: _Reservation | None = None
        self._to_serve: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Bytes of entries, of allocations without an entry, and of reservations."""
        return self._ranges.used

    @property
    def capacity(self) -> int:
        """The budget in bytes."""
        return self._ranges.capacity

    def has(self, key: bytes, salt: str) -> bool:
        """The rows are here, and were made under this salt. Asking changes nothing."""
        entry = self._entries.get(key)
        return entry is not None and entry.salt == salt_hash(salt)

    def find(self, key: bytes, salt: str) -> Entry | None:
        """The entry of a key, if it was made under this salt. Asking changes nothing."""
        return self._entries[key] if self.has(key, salt) else None

    @contextmanager
    def pinned(self, allocation: Allocation) -> Iterator[memoryview]:
        """An allocation's bytes, pinned for the duration of the context."""
        self.pin(allocation)
        try:
            yield self.buffer.slice(allocation.span)
        finally:
            self.unpin(allocation)

    def pin(self, allocation: Allocation) -> None:
        """Pins an allocation until `unpin`. It must be pinned already, or belong to an entry."""
        assert allocation.pins or allocation.kept, "this allocation is free"
        allocation.pins += 1
        if allocation.kept:
            self._ranges.use(allocation.span)

    def unpin(self, allocation: Allocation) -> None:
        """Takes one pin off; the last one frees an allocation that no entry has."""
        assert allocation.pins > 0, "this allocation is not pinned"
        allocation.pins -= 1
        if allocation.pins:
            return
        if allocation.kept:
            self._ranges.let_go(allocation.span)
        else:
            self._unkept.remove(allocation)
            self._free(allocation)
        self._serve_soon()

    def check_size(self, tokens: int) -> None:
        """Raises InvalidInput if so many rows can never fit."""
        if tokens * self._row_bytes > self.capacity:
            raise InvalidInput("the rows are larger than the store", reason="ROWS_TOO_LARGE")

    async def allocate(self, tokens: int) -> Allocation:
        """Allocates room for an item's rows; evicts entries, and waits its turn if too much is pinned.

        Pinned once, for the caller, until `commit` or `abandon`. Raises InvalidInput if the rows can never fit.
        """
        self.check_size(tokens)
        waiter = _Waiter(tokens * self._row_bytes, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if not waiter.future.cancel() and not waiter.future.cancelled():
                self.abandon(waiter.future.result())
            elif self._reservation and self._reservation.waiter is waiter:
                self._give_back(self._reservation)
            self._serve()
            raise

    def trim(self, allocation: Allocation, tokens: int) -> None:
        """Frees an allocation's room behind its first `tokens` rows, before it is committed or read."""
        assert allocation.pins == 1, "somebody reads this allocation"
        assert not allocation.kept, "an entry has this allocation"
        if self._is_reserved(allocation):  # the whole room goes to the reservation's waiter
            allocation.span = Range(allocation.span.offset, tokens * self._row_bytes)
        else:
            allocation.span = self._ranges.trim(allocation.span, tokens * self._row_bytes)
            self._serve_soon()

    def commit(self, allocation: Allocation, header: Header, salt: str) -> Entry:
        """Makes an entry of an allocation whose rows are written; the caller's pin stays on it. If its room is
        reserved, nobody else finds the entry."""
        assert header.key not in self._entries, "an entry is written once"
        entry = Entry(header, salt_hash(salt), allocation)
        if not self._is_reserved(allocation):
            self._unkept.remove(allocation)
            allocation.kept = True
            self._entries[header.key] = entry
            self._ranges.own(entry.span, entry)
        return entry

    def abandon(self, allocation: Allocation) -> None:
        """Drops an allocation; its bytes are freed when nobody reads them any more."""
        assert not allocation.kept, "an entry has this allocation"
        self.unpin(allocation)

    def flush_in_parts(self, most: int = _AT_ONCE) -> Iterator[tuple[int, int]]:
        """Drops every entry that no one is reading, at most so many at a time: yields their number and bytes. In
        between others may use the store."""
        starts = self._ranges.starts[::-1]  # in ascending order, each removal would move all later entries of the lists
        for at in range(0, len(starts), most):
            found = (self._ranges.owner(start) for start in starts[at : at + most])
            gone = [entry for entry in found if entry is not None and not entry.pins]
            for entry in gone:
                self._drop(entry)
            self._serve_soon()
            yield len(gone), sum(entry.span.size for entry in gone)

    async def shrink(self) -> None:
        """Returns all free memory to the system, part by part, in a thread. A part is taken meanwhile, so that nobody
        writes there."""
        if self._registered:
            return
        gaps, size = self._ranges.gaps, self._part
        sizes = [min(size, gap.size - at) for gap in gaps for at in range(0, gap.size, size)]
        taken = map(self._ranges.allocate, sizes)  # first fit: these are the gaps themselves, in their order
        parts = deque(self._hold(span) for span in taken if span is not None)
        try:
            while parts:
                await in_thread(self.buffer.discard, parts[0].span)
                self.abandon(parts.popleft())
        finally:
            for part in parts:
                self.abandon(part)

    def check_integrity(self) -> None:
        """Raises AssertionError if ranges and entries disagree."""
        self._ranges.check_integrity()
        held = [*(entry.allocation for entry in self._entries.values()), *self._unkept]
        spans = [allocation.span for allocation in held if not self._is_reserved(allocation)]
        if self._reservation:
            spans.append(self._reservation.span)
            assert self._reservation.holders <= self._unkept, "who reads what is reserved has no pin"
        entries = self._entries.values()
        assert all(self._ranges.owner(entry.span.offset) is entry for entry in entries), "an entry is elsewhere"
        assert sum(aligned(span.size) for span in spans) == self._ranges.used, "a range has no owner"

    def check_idle(self) -> None:
        """The same, and if something is still held."""
        self.check_integrity()
        assert not self._unkept, "an allocation was neither committed nor abandoned"
        assert not self._waiters, "someone waits for an idle store"
        assert not self._reservation, "room is reserved in an idle store"
        assert not any(entry.pins for entry in self._entries.values()), "an entry is still pinned"

    def _serve_soon(self) -> None:
        """Serves waiters in the next turn of the loop, once for everything freed in this one."""
        if self._to_serve is None and (self._waiters or self._reservation):
            self._to_serve = asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        if self._to_serve is not None:
            self._to_serve.cancel()
            self._to_serve = None
        if self._reservation and not self._reservation.holders:
            self._fulfil(self._reservation)
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():
                if (span := self._room(waiter)) is not None:
                    waiter.future.set_result(self._hold(span))
                elif waiter.searches < _SEARCHES or self._reservation:
                    return
                else:
                    self._reserve(waiter)
            self._waiters.popleft()

    def _room(self, waiter: _Waiter) -> Range | None:
        if waiter.searches == _SEARCHES:  # it waits until another's reservation has ended, or for a gap
            return self._ranges.allocate(waiter.size)
        waiter.searches += 1
        return self._ranges.make_room(waiter.size)

    def _reserve(self, waiter: _Waiter) -> None:
        span, starts = eviction.lightest(self._ranges, waiter.size, self._holders)
        for start in starts:
            if (entry := self._ranges.owner(start)) is not None:
                self._drop(entry)
        holders = {each for each in self._unkept if span.offset <= each.span.offset < span.end}
        for holder in holders:
            self._ranges.free(holder.span)
        self._ranges.take(span)  # in one piece, which nobody gets while it empties
        self._reservation = _Reservation(span, waiter, holders)
        if not holders:
            self._fulfil(self._reservation)

    def _holders(self, start: int) -> int:
        entry = self._ranges.owner(start)
        return entry.pins if entry else _UNWRITTEN

    def _is_reserved(self, allocation: Allocation) -> bool:
        return self._reservation is not None and allocation in self._reservation.holders

    def _fulfil(self, reservation: _Reservation) -> None:
        self._reservation = None
        if reservation.waiter.future.done():  # its caller has left, and will be notified
            self._ranges.free(reservation.span)
        else:
            span = self._ranges.trim(reservation.span, reservation.waiter.size)
            reservation.waiter.future.set_result(self._hold(span))

    def _give_back(self, reservation: _Reservation) -> None:
        self._reservation = None
        self._ranges.free(reservation.span)
        for holder in reservation.holders:
            self._ranges.take(holder.span)

    def _hold(self, span: Range) -> Allocation:
        allocation = Allocation(span)
        self._unkept.add(allocation)
        return allocation

    def _drop(self, entry: Entry) -> None:
        """Drops an entry; its bytes are free when nobody reads them any more."""
        del self._entries[entry.header.key]
        self._ranges.disown(entry.span)
        if entry.pins:
            entry.allocation.kept = False
            self._unkept.add(entry.allocation)
        else:
            self._free(entry.allocation)

    def _free(self, allocation: Allocation) -> None:
        if self._reservation is not None and self._is_reserved(allocation):
            self._reservation.holders.remove(allocation)
        else:
            self._ranges.free(allocation.span)
        for copy in allocation.copies.values():
            copy.drop()


def salt_hash(salt: str) -> bytes:
    """The part of a tenant's secret that is kept."""
    return hashlib.sha256(salt.encode()).digest()
