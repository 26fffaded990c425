"""The encoder cache: a shared-memory arena for embedding rows, which workers have mapped, and its index."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidInput, TwinlensError, Unavailable
from common.media.item import Header
from common.rows.wire import RowLayout
from common.shm.arena import Range, SharedBuffer, aligned
from common.shm.evicting_ranges import EvictingRanges

Watcher = Callable[["CacheEntry"], None]

_OVERTAKINGS = 64
"""How many requests whose items are all here may overtake one that waits for room."""


@dataclass(slots=True, eq=False)
class CacheEntry:
    """An item's place in the arena. The first `landed` rows are there, or, if it is `mirrored`, at the same place in
    the ranks' mirrors; `error` is why no more will come, `lost` means that they went with the mirrors; `stood_at` is
    the item's field in the request that asked for it first."""

    header: Header
    place: Range
    landed: int = 0
    refs: int = 0
    error: TwinlensError | None = None
    filler: asyncio.Task[None] | None = None
    watchers: list[Watcher] = field(default_factory=list)
    stood_at: str = ""
    mirrored: bool = False
    lost: bool = False

    @property
    def complete(self) -> bool:
        """Every row is here."""
        return self.landed == self.header.tokens

    def advance(self, rows: int) -> None:
        """Says that `rows` more rows have landed."""
        self.landed += rows
        self._tell()

    def fail(self, error: TwinlensError) -> None:
        """Says that no more rows will come."""
        self.error = error
        self._tell()

    def error_at(self, field: str) -> TwinlensError:
        """The error for a caller who knows the item by this field."""
        assert self.error is not None
        return self.error.at(field, instead_of=self.stood_at)

    def _tell(self) -> None:
        for watcher in tuple(self.watchers):
            watcher(self)


@dataclass(slots=True)
class CacheCounters:
    """Totals since start."""

    received: int = 0
    hits: int = 0
    by_transport: Counter[int] = field(default_factory=Counter)


class EncoderCache:
    """Owns the arena. The caller of `acquire` must `release` each entry once.

    An entry holds all rows of one item, under its `Header.rows_key`, as long as a request needs them, and then until
    the space is needed. Entries are evicted whole, by `common/shm/evicting_ranges`, those that `retained` names last.
    `on_place` is called first for each place that is given to new rows.
    """

    def __init__(
        self,
        capacity: int,
        layout: RowLayout,
        *,
        retained: Callable[[bytes], bool] = lambda _: False,
        on_place: Callable[[Range], None] = lambda _: None,
    ) -> None:
        self.buffer = SharedBuffer.create("twinlens-rows", capacity)
        self.layout = layout
        self.counters = CacheCounters()
        self._ranges: EvictingRanges[CacheEntry] = EvictingRanges(
            capacity,
            evict=self._drop,
            is_retained=lambda entry: retained(entry.header.rows_key),
        )
        self._entries: dict[bytes, CacheEntry] = {}
        self._on_place = on_place
        self._leaving: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._overtakings = 0
        self._lacking = 0  # bytes of the smallest item that had no room when one was looked for last
        self._freed = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Bytes that entries hold, cached ones included."""
        return self._ranges.used

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        return self._ranges.capacity

    def knows(self, key: bytes) -> bool:
        """Whether the rows of an item are here or on their way, by its `Header.rows_key`."""
        return key in self._entries

    def holds(self, key: bytes) -> bool:
        """Whether all of them are here."""
        entry = self._entries.get(key)
        return entry is not None and entry.complete

    def item_bytes(self, header: Header) -> int:
        """Bytes of an item's rows."""
        return header.tokens * self.layout.row_bytes

    async def acquire(self, headers: Sequence[Header]) -> list[CacheEntry]:
        """The entries of a request's items, in order; waits until all fit at once. They are reserved together or not at
        all, so two requests that do not fit together go one after the other.

        A new entry has no filler yet; the caller starts it. Raises InvalidInput if they can never fit.
        """
        self.check_size(headers)
        async with self._turn:  # first come, first served: a large request is not overtaken for ever
            self._overtakings = 0
            while (entries := self._try_acquire(headers)) is None:
                if self._ranges.idle_count == len(self._entries) and self.flush():
                    continue  # only cached entries that fragment the arena are in the way
                self._lacking = min(self._size(each) for each in headers if not self.knows(each.rows_key))
                self._freed.clear()
                await self._freed.wait()
        return entries

    def acquire_now(self, headers: Sequence[Header]) -> list[CacheEntry] | None:
        """As `acquire`, but None if that would have to wait. Requests without items never wait, and requests whose
        items are all here may overtake those that wait for room, up to a bound."""
        self.check_size(headers)
        if headers and self._turn.locked():
            if self._overtakings == _OVERTAKINGS or not all(self.knows(header.rows_key) for header in headers):
                return None
            self._overtakings += 1
        return self._try_acquire(headers)

    def check_size(self, headers: Sequence[Header]) -> None:
        """Raises InvalidInput if these can never fit together."""
        sizes = {header.rows_key: self._size(header) for header in headers}
        if sum(sizes.values()) > self.capacity_bytes:
            raise InvalidInput(
                "the request's media need more row memory than --row-cache-bytes",
                reason="EMBEDDINGS_TOO_LARGE",
                field="media",
            )

    def _try_acquire(self, headers: Sequence[Header]) -> list[CacheEntry] | None:
        taken: list[CacheEntry] = []
        for header in headers:
            entry = self._entries.get(header.rows_key)
            if entry is not None:
                self._ranges.use(entry.place)
            elif place := self._ranges.make_room(self._size(header)):
                entry = self._entries[header.rows_key] = CacheEntry(header, place)
                self._ranges.own(place, entry)
                self._on_place(place)
            else:
                for earlier in taken:
                    self.release(earlier)
                return None
            entry.refs += 1
            taken.append(entry)
        self.counters.hits += sum(entry.filler is not None for entry in taken)
        return taken

    def _size(self, header: Header) -> int:
        """Bytes that an entry takes, as the arena rounds them up."""
        return aligned(max(1, self.item_bytes(header)))

    def release(self, entry: CacheEntry) -> None:
        """Gives an entry back. A whole one stays as cache; one that no one waits for any more is dropped."""
        entry.refs -= 1
        if entry.refs:
            return
        if entry.complete and entry.error is None:
            self._ranges.let_go(entry.place)
            if not self._may_be_enough(entry):
                return
        else:
            if entry.filler is not None:
                entry.filler.cancel()
            self._drop(entry)
        self._freed.set()

    def _may_be_enough(self, entry: CacheEntry) -> bool:
        """Whether to search for room now that an entry is idle. A search takes a millisecond of the event loop, or
        ten with tens of thousands of entries; an entry with too little room around it changes nothing."""
        if not self._turn.locked() or self._ranges.idle_count == len(self._entries):
            return True
        return self._ranges.fits_around(entry.place, self._lacking)

    def forget(self, entry: CacheEntry) -> None:
        """Makes sure that no new request takes an entry that has failed; its place is freed with the last reference."""
        if self._entries.get(entry.header.rows_key) is entry:
            del self._entries[entry.header.rows_key]
            self._freed.set()  # waiters may have counted on it

    def _drop(self, entry: CacheEntry) -> None:
        self.forget(entry)
        if entry.filler is None or entry.filler.done() or entry.complete:
            self._ranges.free(entry.place)
        else:  # until its filler has ended, a thread may write there
            self._leaving.add(entry.filler)
            entry.filler.add_done_callback(lambda filler: self._left(filler, entry.place))

    def _left(self, filler: asyncio.Task[None], place: Range) -> None:
        self._leaving.discard(filler)
        self._ranges.free(place)
        self._freed.set()

    async def drain(self) -> None:
        """Waits until nobody writes to places that were given up."""
        while self._leaving:
            await asyncio.wait(self._leaving)

    def view(self, entry: CacheEntry) -> memoryview:
        """The place of all rows of an entry; only its filler writes there."""
        begin = entry.place.offset
        return self.buffer.view[begin : begin + self.item_bytes(entry.header)]

    def advance(self, entry: CacheEntry, rows: int, transport: int) -> None:
        """Says that `rows` more rows of an entry are in their place, and how they came."""
        self.counters.received += rows
        self.counters.by_transport[transport] += rows
        entry.advance(rows)

    def mirror(self, entry: CacheEntry) -> None:
        """Rows of an entry may land in the ranks' mirrors, and not in the arena, from now on."""
        entry.mirrored = True

    def lose_mirrors(self) -> None:
        """The ranks' mirrors are gone: their rows are lost, and waiters are told."""
        for entry in [entry for entry in self._entries.values() if entry.mirrored]:
            if not entry.refs:
                self._drop(entry)
                continue
            self.forget(entry)
            if entry.filler is not None:
                entry.filler.cancel()
            entry.lost = True
            entry.fail(Unavailable("the engine has ended and is being restarted", reason="ENGINE_UNAVAILABLE"))
        self._freed.set()

    def flush(self) -> int:
        """Drops all cached entries that no request uses; the bytes freed."""
        before = self.used_bytes
        # In any other order each would move those behind it in lists.
        for entry in sorted(self._ranges.idle, key=lambda entry: entry.place.offset, reverse=True):
            self._drop(entry)
        self._freed.set()
        return before - self.used_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the index and the arena disagree."""
        self._ranges.check_integrity()
        idle = {*self._ranges.idle}
        assert all(each.complete and not each.refs and each.error is None for each in idle), "cache is in use"
        assert idle <= {*self._entries.values()}, "nobody finds what is kept"
        used = sum(self._size(entry.header) for entry in self._entries.values())
        assert used <= self.used_bytes, "an entry has no place"
        owners = {*self._ranges.owners}
        assert owners >= {*self._entries.values()}, "an entry is elsewhere"
        assert sorted(each.place.offset for each in owners) == self._ranges.starts, "a place is nobody's"

    def check_idle(self) -> None:
        """The same, and if something is still held."""
        self.check_integrity()
        kept, used = self._ranges.idle_count, sum(self._size(entry.header) for entry in self._entries.values())
        assert kept == len(self._entries), "an entry is still referred to"
        assert used == self.used_bytes, "the place of an entry that failed was never given back"
        assert len(self._ranges.starts) == kept, "a place is kept for nobody"
        assert not self._turn.locked(), "someone waits for an idle store"

    def close(self) -> None:
        """Unmaps the arena."""
        self.buffer.close()
