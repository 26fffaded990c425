"""Brings a request's media into the row arena: headers first, so that the prompt can be laid out, then rows.

Filling an entry belongs to the entry, not to the request that began it: others may wait for the same rows, so that
request's deadline does not bound the stream; when it ends, and nobody else waits, the stream is cancelled. A stream
that breaks is opened again, on another encoder where there is one, from the first missing row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from common.errors import MEDIA_HOST, DataLoss, Internal, TwinlensError, Unavailable
from llm_service.encoders.peer import EncodeCall, Peer
from llm_service.encoders.pool import EncoderPool
from llm_service.request import MediaHeader, MediaItem, Request
from llm_service.rows import RowEntry, RowStore

_ATTEMPTS = 3


@dataclass(slots=True)
class Opened:
    """An item whose header has come, and the open stream that its rows will come from; `close` ends the stream."""

    item: MediaItem
    header: MediaHeader
    peer: Peer
    call: EncodeCall
    holds: AsyncExitStack

    async def close(self) -> None:
        await self.holds.aclose()


class Landing:
    """Opens items at encoders and fills entries of the row store. `timeout` bounds an item's encoding, in seconds."""

    def __init__(self, pool: EncoderPool, store: RowStore, timeout: float) -> None:
        self._pool = pool
        self._store = store
        self._timeout = timeout

    async def land(self, request: Request) -> list[RowEntry]:
        """Entries for all items of a request, in order; rows go on landing in the background.

        The caller owns the entries and releases each once. Raises the error of the first item that fails.
        """
        opened = await self._open_all(request)
        try:
            entries = await self._store.acquire([item.header for item in opened])
        except BaseException:
            await asyncio.gather(*(item.close() for item in opened))
            raise
        surplus: list[Opened] = []
        for item, entry in zip(opened, entries, strict=True):
            if entry.filler is None:
                entry.brought_by = request.id
                entry.filler = asyncio.create_task(self._fill(entry, item, request), name="fill rows")
            else:
                surplus.append(item)  # its rows are here, or another stream brings them
        try:
            await asyncio.gather(*(item.close() for item in surplus))
        except BaseException:
            for entry in entries:
                self._store.release(entry)
            raise
        return entries

    async def _open_all(self, request: Request) -> list[Opened]:
        opened: list[Opened | None] = [None] * len(request.media)

        async def open_one(item: MediaItem) -> None:
            opened[item.index] = await self._open(item, request, [])

        try:
            async with asyncio.TaskGroup() as group:
                for item in request.media:
                    group.create_task(open_one(item))
        except BaseException as error:
            await asyncio.gather(*(item.close() for item in opened if item is not None))
            if isinstance(error, ExceptionGroup):
                raise next(iter(error.exceptions)) from error
            raise
        return [item for item in opened if item is not None]

    async def _open(self, item: MediaItem, request: Request, tried: list[str]) -> Opened:
        """Asks encoders one after the other until one sends a header, and notes them in `tried`; those already there
        are left out. An item's own fault is not retried."""
        while True:
            peer = await self._pool.pick(item, tried)
            tried.append(peer.address)
            holds = AsyncExitStack()
            try:
                call = await holds.enter_async_context(
                    peer.encode(
                        item,
                        request_id=request.id,
                        salt=request.salt,
                        priority=request.priority,
                        timeout=self._timeout,
                        layout=self._store.layout,
                    )
                )
                return Opened(item, await call.header(), peer, call, holds)
            except (Unavailable, DataLoss) as error:
                await holds.aclose()
                self._suspect(peer, error)
                if len(tried) >= _ATTEMPTS or not self._others(tried):
                    raise
            except BaseException:
                await holds.aclose()
                raise

    async def _fill(self, entry: RowEntry, opened: Opened, request: Request) -> None:
        """Lands every row of an entry, over as many streams as it takes within bounds."""
        tried = [opened.peer.address]
        try:
            while True:
                try:
                    await self._receive(entry, opened)
                    return
                except (Unavailable, DataLoss) as error:
                    if entry.complete:
                        return  # the stream broke after its last row
                    self._suspect(opened.peer, error)
                    await opened.close()
                    if len(tried) >= _ATTEMPTS or not self._others(tried):
                        raise
                    opened = await self._open(opened.item, request, tried)
                    if opened.header.key != entry.header.key:
                        raise DataLoss("two encoders give one item different keys") from error
        except TwinlensError as error:
            self._store.forget(entry)
            entry.fail(error)
        finally:
            await opened.close()
            if not entry.complete and entry.error is None:  # nobody may wait for rows that no task brings
                self._store.forget(entry)
                entry.fail(Internal("the rows of an item could not be received"))

    async def _receive(self, entry: RowEntry, opened: Opened) -> None:
        async with aclosing(opened.call.rows(entry.landed, entry.header.tokens)) as runs:
            async for data in runs:
                self._store.write(entry, data)
        entry.timings = opened.call.timings

    def _others(self, tried: Sequence[str]) -> bool:
        return any(peer.usable and peer.address not in tried for peer in self._pool.peers)

    @staticmethod
    def _suspect(peer: Peer, error: TwinlensError) -> None:
        if isinstance(error, Unavailable) and error.reason != MEDIA_HOST:
            peer.suspect()
