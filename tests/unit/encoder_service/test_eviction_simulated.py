"""How much a store forgets for large rows, and how often it is asked for what it still has, by a simulation."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.media.item import Grid, Header, Modality
from common.rows.wire import DType, RowLayout
from common.shm.arena import Range, RangeAllocator, SharedBuffer
from encoder_service.engine.device_pool import DevicePool, Slice
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.worker.messages import PoolMade
from llm_service.encoders.encoder_cache import EncoderCache

MIB = 1 << 20
CAPACITY = 1024
"""MiB; a row is one. Nothing is written to them, so they take no memory."""


def header(number: int, size: int) -> Header:
    return Header(number.to_bytes(32, "big"), Modality.IMAGE, Grid(1, 2, 2 * size), size)


class Store:
    """The encoder's."""

    def __init__(self) -> None:
        self.buffer = SharedBuffer.create("test", CAPACITY * MIB)
        self.store = EmbeddingStore(self.buffer, MIB)

    def use(self, number: int) -> bool:
        if (entry := self.store.find(number.to_bytes(32, "big"), "")) is None:
            return False
        with self.store.pinned(entry.allocation):
            return True

    def put(self, number: int, size: int) -> None:
        try:
            self.store.allocate(size).send(None)
        except StopIteration as granted:
            self.store.unpin(self.store.commit(granted.value, header(number, size), "").allocation)

    @property
    def used(self) -> int:
        return self.store.used // MIB

    def close(self) -> None:
        self.store.check_idle()
        self.buffer.close()


class Cache:
    """The LLM service's."""

    def __init__(self) -> None:
        self.cache = EncoderCache(CAPACITY * MIB, RowLayout(1, MIB // 4, DType.FLOAT32))
        self.headers: dict[int, Header] = {}

    def use(self, number: int) -> bool:
        known = number in self.headers and self.cache.knows(self.headers[number].rows_key)
        if known:
            self.put(number, self.headers[number].tokens)
        return known

    def put(self, number: int, size: int) -> None:
        self.headers[number] = header(number, size)
        entries = self.cache.acquire_now([self.headers[number]])
        assert entries is not None
        self.cache.advance(entries[0], size - entries[0].landed, 1)
        self.cache.release(entries[0])

    @property
    def used(self) -> int:
        return self.cache.used_bytes // MIB

    def close(self) -> None:
        self.cache.check_idle()
        self.cache.close()


class Pool:
    """A device worker's."""

    def __init__(self) -> None:
        self.pool = DevicePool(PoolMade("device", b"handle", CAPACITY * MIB), MIB)
        self.slices: dict[int, Slice] = {}

    def use(self, number: int) -> bool:
        if not (number in self.slices and self.slices[number].kept):
            return False
        self.pool.pin(self.slices[number])
        self.pool.unpin(self.slices[number])
        return True

    def put(self, number: int, size: int) -> None:
        made = self.pool.allocate(size)
        assert made is not None
        made.commit(0)
        self.slices[number] = made

    @property
    def used(self) -> int:
        return self.pool.used // MIB

    def close(self) -> None:
        self.pool.check_idle()


class Plain:
    """What all of them were: the least recently used go, wherever they lie, until there is room."""

    def __init__(self) -> None:
        self.ranges = RangeAllocator(CAPACITY * MIB)
        self.entries: OrderedDict[int, Range] = OrderedDict()

    def use(self, number: int) -> bool:
        if number in self.entries:
            self.entries.move_to_end(number)
        return number in self.entries

    def put(self, number: int, size: int) -> None:
        while (span := self.ranges.allocate(size * MIB)) is None:
            self.ranges.free(self.entries.popitem(last=False)[1])
        self.entries[number] = span

    @property
    def used(self) -> int:
        return self.ranges.used // MIB

    def close(self) -> None:
        self.ranges.check_integrity()


Kind = type[Store] | type[Cache] | type[Pool] | type[Plain]


@contextmanager
def full(kind: Kind, seed: int) -> Iterator[Store | Cache | Pool | Plain]:
    """One that has been in use for some time, of pictures alone: 8 to 47 MiB each."""
    draw, made = random.Random(seed), kind()
    for number in range(300):
        made.put(number, draw.randint(8, 47))
        if draw.random() < 0.7:
            made.use(draw.randint(max(0, number - 40), number))
    yield made
    made.close()


def forgotten(kind: Kind, wanted: int) -> float:
    """Bytes that go for so many MiB, in sum over several such stores, by those that are wanted."""
    total = 0
    for seed in range(6):
        with full(kind, seed) as made:
            before = made.used
            made.put(1000, wanted)
            total += before + wanted - made.used
    return total / (6 * wanted)


def hits(kind: Kind, exponent: float, large: float) -> float:
    """The share of requests whose rows are there, of 150 items that are asked for as by Zipf; some are videos."""
    draw, made = random.Random(round(10 * exponent)), kind()
    sizes = [draw.randint(64, 384) if draw.random() < large else draw.randint(8, 47) for _ in range(150)]
    found = 0
    for number in draw.choices(range(150), [(rank + 1) ** -exponent for rank in range(150)], k=1500):
        if made.use(number):
            found += 1
        else:
            made.put(number, sizes[number])
    made.close()
    return found / 1500


@pytest.mark.parametrize("kind", [Store, Cache, Pool])
@pytest.mark.parametrize("wanted", [64, 128, 384])
async def test_large_rows_push_out_hardly_more_than_they_need(kind: Kind, wanted: int) -> None:
    assert forgotten(kind, wanted) <= 1.4
    assert forgotten(Plain, wanted) > 1.6, "the neighbours are what makes the difference"


@pytest.mark.parametrize(("exponent", "large"), [(0.8, 0.03), (1.0, 0.03), (1.2, 0.0), (0.8, 0.1)])
async def test_no_less_is_found_than_if_the_oldest_went_wherever_they_lie(exponent: float, large: float) -> None:
    assert hits(Store, exponent, large) >= hits(Plain, exponent, large)
