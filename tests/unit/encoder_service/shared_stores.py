"""Replicas over one shared store: what its tests put into it, and how they look at what comes back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np

from common.media.item import Grid, Header, Modality
from common.rows.wire import DType, RowLayout
from common.shm.arena import SharedBuffer
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.shared_store import SharedStore
from encoder_service.engine.shared_store_client import SharedStoreClient
from tests.waiting import eventually

LAYOUT = RowLayout(3, 64, DType.FLOAT32)
TOKENS = 4000
HEADER = Header(b"k" * 32, Modality.VIDEO, Grid(4, 100, 40), TOKENS, (0.25, 1.5, 2.0, 3.75), 1.25)
ROWS = np.random.default_rng(3).bytes(TOKENS * LAYOUT.row_bytes)
NAME = f"twinlens:rows:{HEADER.key.hex()}"
LOCK = f"twinlens:lock:{HEADER.key.hex()}"


@asynccontextmanager
async def replica(url: str, *, seconds: float = 5.0, layout=LAYOUT, breaker=None, **options):
    """A replica's shared store and its own, with room for two items; neither holds anything at the end."""
    arena = SharedBuffer.create("test", 2 * len(ROWS) + 1024)
    store = EmbeddingStore(arena, layout.row_bytes)
    given = {"ttl": 60.0, "wait": 5.0, **options}
    made = SharedStore(SharedStoreClient(url, seconds=seconds, breaker=breaker), store, layout, **given)
    made.start()
    try:
        yield made, store
    finally:
        await made.stop()
        made.check_idle()
        list(store.flush_in_parts())
        store.check_idle()
        assert store.used == 0
        arena.close()


async def computed(
    made: SharedStore, store: EmbeddingStore, header: Header = HEADER, salt: str = "", found: Header | None = None
) -> None:
    """Takes a turn, in which this header is found, and puts the rows into the store as a worker would."""
    async with made.lock(header.key, salt) as lock:
        assert lock.found == found
        allocation = await store.allocate(header.tokens)
        store.buffer.slice(allocation.span)[:] = ROWS[: allocation.span.size]
        entry, lock.computed = store.commit(allocation, header, salt), True
    store.unpin(entry.allocation)


async def written(made: SharedStore, count: int = 1) -> None:
    counts = made.counts
    await eventually(lambda: counts["written"] + counts["dropped"] >= count, "all is written")
    while made._background:
        await asyncio.gather(*made._background)


def stop_writing(made: SharedStore) -> None:
    """Before the writers have begun with what is offered, which so stays."""
    for writer in made._writers:
        writer.cancel()


async def loaded(made: SharedStore, header: Header) -> bytes:
    target = bytearray(header.tokens * LAYOUT.row_bytes)
    await made.load(header, memoryview(target))
    return bytes(target)


class Clock:
    """A breaker's time, which passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def heard(self, made: SharedStore, header: Header = HEADER) -> Header:
        """What the server says when it is heard in time: on a busy machine it may have to be asked again."""
        while (found := await made.find(header.key, "")) is None:
            self.now += 60
        return found
