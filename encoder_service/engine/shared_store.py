"""The shared store: rows in a Redis or Valkey server, which all replicas ask before they compute. An item is one hash:
field `h` is its header, fields 0, 1, … are its chunks (`shared_store_format`); it is written under another name first.
While a replica computes the item, there is a lock beside it. A lost replica, server or key costs time, never an
item."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.aio import tasks
from common.media.item import Header
from common.rows.wire import RowLayout
from common.telemetry import log
from encoder_service.engine import shared_store_format
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from encoder_service.engine.shared_store_format import Garbage

if TYPE_CHECKING:
    from encoder_service.engine.shared_store_client import Progressed, SharedStoreClient

_PREFIX = "twinlens:rows:"
_PARTS = "twinlens:part:"
_LOCKS = "twinlens:lock:"
_HEADER = b"h"
_AT_ONCE = 4
"""Chunks fetched together."""

_WRITES = 256
"""Most items that wait to be written."""

_WRITERS = 4
"""Items that are written at a time, so that a large one does not keep all others waiting."""

_PART_SECONDS = 60
"""Seconds for which a partly written item stays after its writer is lost, beyond the time for the next part."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
_UNLOCK = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

_log = log.get("shared store")


class SharedStoreMiss(Exception):
    """The rows are not in the shared store after all."""


@dataclass(slots=True, eq=False)
class SharedStoreLock:
    """The result of `SharedStore.lock`: `found` is set if another replica has put the item there. The holder of the
    lock says that it is `computed` once the local store has an entry of it."""

    found: Header | None = None
    computed: bool = False


class SharedStore:
    """Rows of `layout`, kept for `ttl` seconds after their last use. `start` and `stop` are called by the owner.

    `wait` is how many seconds a replica waits for another's rows. If `writes` items wait to be written, further ones
    are dropped. No method raises because of the server.
    """

    def __init__(
        self,
        client: SharedStoreClient,
        store: EmbeddingStore,
        layout: RowLayout,
        *,
        ttl: float,
        wait: float,
        writes: int = _WRITES,
    ) -> None:
        self.client = client
        self.counts = client.counts
        self._store = store
        self._layout = layout
        self._ttl = max(1, round(ttl))
        self._wait = wait
        self._queue: asyncio.Queue[tuple[bytes, str, bytes]] = asyncio.Queue(writes)
        self._writers: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Starts writing offered items."""
        self._writers = [tasks.start(self._write_all(), "shared store writer") for _ in range(_WRITERS)]

    async def stop(self) -> None:
        """Stops writing and closes the connections; items not written yet are dropped."""
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)
        while not self._queue.empty():
            key, _, token = self._queue.get_nowait()
            self._unlock_soon(key, token)
        await asyncio.gather(*self._background)
        await self.client.close()

    async def find(self, key: bytes, salt: str) -> Header | None:
        """The header of an item that is there under this salt."""
        return (await self.find_all([key], salt))[0]

    async def find_all(self, keys: Sequence[bytes], salt: str) -> list[Header | None]:
        """As `find`, for several keys at once."""

        async def get(server: Any) -> list[Any]:
            async with server.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hget(_rows_name(key), _HEADER).expire(_rows_name(key), self._ttl)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
                return answers

        answers = await self.client.ask(get) or [None] * (2 * len(keys))
        return [self._header(key, salt, found) for key, found in zip(keys, answers[::2], strict=True)]

    async def load(self, header: Header, into: memoryview) -> None:
        """Copies an item's rows to `into`; raises SharedStoreMiss if they are incomplete or no longer come."""
        chunks, name = list(enumerate(self._layout.chunks(0, header.tokens))), _rows_name(header.key)

        async def get(server: Any, progressed: Progressed) -> Garbage | bool:
            if progressed(await server.hlen(name)) <= len(chunks):
                return False
            for at in range(0, len(chunks), _AT_ONCE):
                some = chunks[at : at + _AT_ONCE]
                async with server.pipeline(transaction=False) as pipe:
                    pipe.response_callbacks = {"HGET": progressed}  # for each chunk as soon as it arrives
                    for number, _ in some:
                        pipe.hget(name, str(number))
                    found = await pipe.execute()
                if None in found:  # it was evicted meanwhile, or is being rewritten
                    return False
                try:
                    for data, (number, run) in zip(found, some, strict=True):
                        shared_store_format.read_chunk(data, header.key, number, self._place(into, run))
                except Garbage as why:
                    return why
            return True

        got = await self.client.transfer(get, len(into))
        if isinstance(got, Garbage):
            await self._discard(header.key, got)
        if got is not True:
            raise SharedStoreMiss
        self.counts["hits"] += 1

    @asynccontextmanager
    async def lock(self, key: bytes, salt: str) -> AsyncIterator[SharedStoreLock]:
        """This replica's lock to compute an item, or another replica's rows.

        An item that is `computed` is then written in the background, if the local store still has it, and the lock
        released afterwards. On every other way out the lock is released at once.
        """
        token = secrets.token_bytes(16)
        locked = True  # until known otherwise: an interrupted call may have been answered
        lock = SharedStoreLock()
        try:
            lock.found, locked = await self._lock_or_find(key, salt, token)
            yield lock
        finally:
            if lock.computed:
                self._offer(key, salt, token)
            elif locked:
                self._unlock_soon(key, token)

    def check_idle(self) -> None:
        """Raises AssertionError if, once stopped, something is in progress."""
        assert not self._background, "something is still done in the background"

    async def _lock_or_find(self, key: bytes, salt: str, token: bytes) -> tuple[Header | None, bool]:
        """The item's header once it is there, or whether its lock is ours, with an expiry in case we are lost. Neither,
        if waiting is not worthwhile any more."""
        pause, end = _FIRST_PAUSE, time.monotonic() + self._wait
        expiry = max(1, round(1000 * self._wait))

        async def look(server: Any) -> list[Any]:
            async with server.pipeline(transaction=False) as pipe:
                pipe.set(_lock_name(key), token, nx=True, px=expiry).hget(_rows_name(key), _HEADER)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
                return answers

        while True:
            answers = await self.client.ask(look)
            if answers is None:
                return None, True  # perhaps
            locked, data = answers
            if (found := self._header(key, salt, data)) is not None or locked is not None:
                return found, locked is True  # otherwise an error, as from a read-only server
            if time.monotonic() >= end:
                self.counts["waits_in_vain"] += 1
                return None, False
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _header(self, key: bytes, salt: str, data: Any) -> Header | None:
        if not isinstance(data, bytes):
            return None
        try:
            return shared_store_format.read_header(data, key, salt, self._layout)
        except Garbage as why:
            self._start(self._discard(key, why))
            return None

    async def _discard(self, key: bytes, why: Garbage) -> None:
        _log.warning("the shared store holds other bytes than asked for", cause=str(why))
        self.counts["garbage"] += 1
        await self._delete(_rows_name(key))

    def _offer(self, key: bytes, salt: str, token: bytes) -> None:
        """Queues an entry for writing; drops it if too many wait."""
        try:
            self._queue.put_nowait((key, salt, token))
        except asyncio.QueueFull:
            self.counts["dropped"] += 1
            self._unlock_soon(key, token)

    async def _write_all(self) -> None:
        while True:
            key, salt, token = await self._queue.get()
            try:
                entry = self._store.find(key, salt)
                if entry is not None and await self._write(entry, salt):
                    self.counts["written"] += 1
                else:
                    self.counts["dropped"] += 1
            finally:
                self._unlock_soon(key, token)

    async def _write(self, entry: Entry, salt: str) -> bool:
        """Writes an entry under a temporary name, renamed at the end: an item is complete or absent.

        The entry is not pinned, since a slow server would then keep room from others; if it is evicted, or its chunks
        take too long, what was written is deleted.
        """
        header, part = entry.header, _PARTS + secrets.token_hex(16)
        chunks = list(self._layout.chunks(0, header.tokens))

        async def put(server: Any, progressed: Progressed) -> bool:
            await self._set(
                server, part, _HEADER, shared_store_format.pack_header(header, salt, self._layout), progressed
            )
            for number, run in enumerate(chunks):
                if self._store.find(header.key, salt) is not entry:
                    return False
                rows = self._place(self._store.buffer.slice(entry.span), run)
                await self._set(
                    server, part, str(number), shared_store_format.pack_chunk(header.key, number, rows), progressed
                )
            if progressed(await server.hlen(part)) <= len(chunks):  # it was evicted after some had been written
                return False
            async with server.pipeline(transaction=True) as pipe:
                await pipe.rename(part, _rows_name(header.key)).expire(_rows_name(header.key), self._ttl).execute()
            return True

        whole = None
        try:
            whole = await self.client.transfer(put, entry.span.size)
        finally:
            if not whole:
                self._start(self._delete(part))
        return bool(whole)

    async def _set(self, server: Any, name: str, field: str | bytes, value: bytes, progressed: Progressed) -> None:
        """Sets one field; each time with the expiry, so that nothing stays for ever when we are cut off."""
        expiry = _PART_SECONDS + math.ceil(self.client.seconds)
        async with server.pipeline(transaction=True) as pipe:
            progressed(await pipe.hset(name, field, value).expire(name, expiry).execute())

    async def _delete(self, name: str) -> None:
        await self.client.ask(lambda server: server.unlink(name))

    def _place(self, rows: memoryview, run: tuple[int, int]) -> memoryview:
        first, count = run
        return rows[first * self._layout.row_bytes : (first + count) * self._layout.row_bytes]

    def _unlock_soon(self, key: bytes, token: bytes) -> None:
        self._start(self._unlock(key, token))

    async def _unlock(self, key: bytes, token: bytes) -> None:
        await self.client.ask(lambda server: server.eval(_UNLOCK, 1, _lock_name(key), token))

    def _start(self, work: Any) -> None:
        task = tasks.start(work, "shared store")
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _rows_name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _lock_name(key: bytes) -> str:
    return _LOCKS + key.hex()
