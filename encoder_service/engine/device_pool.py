"""Rows in the device workers' own memory, for readers on the same GPU: which bytes of which pool hold which rows. They
are in the store's arena as well, so nobody waits for room: a reader without a slice reads them there."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from common.shm.arena import Range, aligned
from common.shm.evicting_ranges import EvictingRanges
from encoder_service.worker.messages import PoolMade


@dataclass(slots=True, eq=False)
class Slice:
    """Some of an item's rows, in one pool; `row_sum` is announced with them (`device_memory.row_sum`).

    It is pinned by the worker that writes it, then by readers, and `kept` from when it is written until its item leaves
    the store, the room is needed, or the worker is gone.
    """

    pool: DevicePool
    span: Range
    rows: int
    row_sum: int = 0
    pins: int = 1
    kept: bool = False

    def commit(self, row_sum: int) -> None:
        """The rows are written: removes the worker's pin."""
        self.row_sum, self.kept = row_sum, True
        self.pool.unpin(self)

    def abandon(self) -> None:
        """The rows were not written: frees the slice."""
        self.pool.unpin(self)

    def drop(self) -> None:
        """Its item has left the store: the room is freed after the last reader."""
        self.kept = False
        if not self.pins:
            self.pool.free(self)


class DevicePool:
    """One worker's pool. `name` is never reused; `handle` opens it, on the device with UUID `device`."""

    def __init__(self, made: PoolMade, row_bytes: int) -> None:
        self.name = f"pool-{secrets.token_hex(8)}"
        self.handle = made.handle
        self.device = made.device
        self.lost = False
        self._row_bytes = row_bytes
        self._ranges: EvictingRanges[Slice] = EvictingRanges(made.size, evict=self.free)

    @property
    def used(self) -> int:
        """Bytes of slices."""
        return self._ranges.used

    @property
    def capacity(self) -> int:
        """Its size in bytes."""
        return self._ranges.capacity

    def allocate(self, rows: int) -> Slice | None:
        """Room for rows that are sent to the worker, pinned once; None, without evicting anything, if pinned slices
        leave too little."""
        if self.lost:
            return None
        span = self._ranges.make_room(rows * self._row_bytes)
        if span is None:
            return None
        made = Slice(self, span, rows)
        self._ranges.own(span, made)
        return made

    def pin(self, slice_: Slice) -> None:
        """Pins a slice until `unpin`."""
        assert slice_.kept, "this slice is free"
        slice_.pins += 1
        self._ranges.use(slice_.span)

    def unpin(self, slice_: Slice) -> None:
        """Takes a pin off; the last one frees a slice that is not kept."""
        assert slice_.pins > 0, "this slice is not pinned"
        slice_.pins -= 1
        if slice_.pins:
            return
        if slice_.kept:
            self._ranges.let_go(slice_.span)
        else:
            self.free(slice_)

    def lose(self) -> None:
        """The worker is gone, with its memory."""
        self.lost = True
        for slice_ in self._ranges.owners:
            slice_.kept = False

    def check_integrity(self) -> None:
        """Raises AssertionError if ranges and slices disagree."""
        self._ranges.check_integrity()
        assert sum(aligned(slice_.span.size) for slice_ in self._ranges.owners) == self.used, "a range has no owner"

    def check_idle(self) -> None:
        """The same, and if something is still held."""
        self.check_integrity()
        assert not any(slice_.pins for slice_ in self._ranges.owners), "a slice is still pinned"

    def free(self, slice_: Slice) -> None:
        """Frees the bytes of an unpinned slice, once."""
        slice_.kept = False
        if self._ranges.owner(slice_.span.offset) is slice_:
            self._ranges.free(slice_.span)


@dataclass(slots=True)
class DevicePools:
    """The pools of live workers. `on_lost` is called first for a pool whose worker is gone."""

    row_bytes: int
    on_lost: Callable[[DevicePool], None] = lambda _: None
    alive: list[DevicePool] = field(default_factory=list)

    def open(self, made: PoolMade | None) -> DevicePool | None:
        """A worker is ready, and has made a pool."""
        if made is None:
            return None
        pool = DevicePool(made, self.row_bytes)
        self.alive.append(pool)
        return pool

    def lose(self, pool: DevicePool | None) -> None:
        """A worker is gone."""
        if pool is not None and not pool.lost:
            pool.lose()
            self.alive.remove(pool)
            self.on_lost(pool)

    def check_integrity(self) -> None:
        """Raises AssertionError if a pool's parts disagree."""
        for pool in self.alive:
            pool.check_integrity()

    def check_idle(self) -> None:
        """The same, and if something is still held."""
        for pool in self.alive:
            pool.check_idle()
