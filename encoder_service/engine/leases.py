"""Leases on rows that a reader outside this process copies from the store's arena or a device pool. The stream that
offers rows takes a lease for the duration of a `with` block; `ended` tells it to leave."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from common.errors import LEASE_EXPIRED, Unavailable
from common.shm.arena import Range
from common.shm.lease_board import LeaseBoard
from encoder_service.engine.device_pool import DevicePool, Slice
from encoder_service.engine.embedding_store import Allocation, EmbeddingStore


@dataclass(slots=True, eq=False)
class Lease:
    """Rows that must stay in place."""

    name: str
    """The name that `Release` uses."""
    seconds: float
    """How long it holds at most."""
    owner: bytes
    """The reader."""
    slot: int
    number: int
    """Stands in the slot of the board while it holds."""
    memory: EmbeddingStore | DevicePool
    """The owner of these rows' memory."""
    span: Range
    """Their place there."""
    unpin: Callable[[], None]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    expired: bool = False
    """Its time ended it."""
    lost: bool = False
    """The memory is gone."""

    async def returned(self) -> None:
        """Waits until the reader has released it, or is gone. Raises Unavailable if it has expired, or the memory is
        lost."""
        await self.ended.wait()
        if self.lost:
            raise Unavailable("the worker whose memory held the rows has ended", reason="POOL_LOST")
        if self.expired:
            raise Unavailable("the rows were not read in time", reason=LEASE_EXPIRED)


class Leases:
    """All leases on one store and its pools; each lasts at most `seconds`."""

    def __init__(self, store: EmbeddingStore, board: LeaseBoard, seconds: float) -> None:
        self._seconds = seconds
        self._store = store
        self._board = board
        self._held: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def room(self) -> int:
        """How often `take` can be called now."""
        return self._board.room

    def take(self, allocation: Allocation, owner: bytes) -> AbstractContextManager[Lease]:
        """Pins an allocation of the store for a reader, at most for the duration of the context. There must be a free
        slot."""
        pin, unpin = partial(self._store.pin, allocation), partial(self._store.unpin, allocation)
        return self._lease(self._store, allocation.span, pin, unpin, owner)

    def take_slice(self, slice_: Slice, owner: bytes) -> AbstractContextManager[Lease]:
        """The same of a slice of a pool."""
        pin, unpin = partial(slice_.pool.pin, slice_), partial(slice_.pool.unpin, slice_)
        return self._lease(slice_.pool, slice_.span, pin, unpin, owner)

    @contextmanager
    def _lease(
        self,
        memory: EmbeddingStore | DevicePool,
        span: Range,
        pin: Callable[[], None],
        unpin: Callable[[], None],
        owner: bytes,
    ) -> Iterator[Lease]:
        posted = self._board.post()
        assert posted is not None, "no slot is free"
        slot, number = posted
        lease = Lease(secrets.token_hex(8), self._seconds, owner, slot, number, memory, span, unpin)
        pin()
        self._held[lease.name] = lease
        timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, lease)
        try:
            yield lease
        finally:
            timer.cancel()
            self._end(lease)

    def release(self, name: str) -> bool:
        """Ends a lease by its name; False for one that is unknown or has ended."""
        lease = self._held.get(name)
        return lease is not None and self._end(lease)

    def release_number(self, number: int, owner: bytes) -> None:
        """Ends a lease of a reader by its number; one that has ended is skipped."""
        for lease in self._of(owner):
            if lease.number == number:
                self._end(lease)

    def drop(self, owner: bytes) -> None:
        """Ends every lease of a reader that is gone."""
        for lease in self._of(owner):
            self._end(lease)

    def lose(self, pool: DevicePool) -> None:
        """Ends all leases on a pool whose worker is gone."""
        for lease in list(self._held.values()):
            if lease.memory is pool:
                lease.lost = self._end(lease)

    def check_idle(self) -> None:
        """Raises AssertionError if a lease is still held."""
        assert not self._held, "a lease is still held"
        assert self._board.held == 0, "a slot of the board is still in use"

    def _of(self, owner: bytes) -> list[Lease]:
        return [lease for lease in self._held.values() if lease.owner == owner]

    def _expire(self, lease: Lease) -> None:
        lease.expired = self._end(lease)

    def _end(self, lease: Lease) -> bool:
        if self._held.pop(lease.name, None) is None:
            return False
        # The number is cleared before the pin: nothing is written there while it is set, so a late reader notices.
        self._board.clear(lease.slot)
        lease.unpin()
        lease.ended.set()
        return True
