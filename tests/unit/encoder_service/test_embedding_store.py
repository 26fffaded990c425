"""The store, at random: never above its budget, never evicting what is pinned, never losing a byte."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from common.errors import InvalidInput
from common.media.item import Grid, Header, Modality
from common.shm import eviction
from common.shm.arena import Range, SharedBuffer
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from tests.unit.encoder_service.fakes import turns

ROW = 64


def header(key: bytes, tokens: int) -> Header:
    return Header(key, Modality.IMAGE, Grid(1, 2, 2 * tokens), tokens)


@pytest.fixture
def store():
    buffer = SharedBuffer.create("test", 16 * ROW)
    yield EmbeddingStore(buffer, ROW, part=4 * ROW)
    buffer.close()


async def put(store: EmbeddingStore, key: bytes, tokens: int, salt: str = "") -> Entry:
    entry = store.commit(await store.allocate(tokens), header(key, tokens), salt)
    store.unpin(entry.allocation)
    return entry


async def test_the_least_recently_used_goes_first(store):
    for key in (b"a", b"b", b"c"):
        await put(store, key, 5)
    entry = store.find(b"a", "")
    with store.pinned(entry.allocation):
        pass
    await put(store, b"d", 5)
    assert [key for key in (b"a", b"b", b"c", b"d") if store.has(key, "")] == [b"a", b"c", b"d"]


async def test_asking_whether_a_key_is_here_does_not_use_it(store):
    for key in (b"a", b"b", b"c"):
        await put(store, key, 5)
    assert store.find(b"a", "")
    await put(store, b"d", 5)
    assert not store.has(b"a", "")


async def test_an_entry_is_its_tenants_alone(store):
    await put(store, b"a", 1, salt="mine")
    assert store.find(b"a", "mine") is not None
    assert store.find(b"a", "theirs") is None
    assert store.find(b"a", "") is None


async def test_rows_that_never_fit_are_refused(store):
    with pytest.raises(InvalidInput, match="larger than the store"):
        await store.allocate(17)
    store.check_idle()


async def test_what_is_pinned_stays_and_others_wait_for_it(store):
    entry = await put(store, b"a", 10)
    with store.pinned(entry.allocation) as data:
        data[:4] = b"rows"
        waiting = asyncio.create_task(store.allocate(10))
        small = asyncio.create_task(store.allocate(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not small.done(), "first come, first served"
        assert store.find(b"a", "") is entry
        assert bytes(data[:4]) == b"rows"
    store.abandon(await waiting)
    store.abandon(await small)
    assert not store.has(b"a", "")
    store.check_idle()


async def test_nothing_is_evicted_where_that_would_not_be_enough(store):
    pinned, other = await put(store, b"a", 10), await put(store, b"b", 3)
    with store.pinned(pinned.allocation):
        waiting = asyncio.create_task(store.allocate(8))
        await asyncio.sleep(0)
        assert store.find(b"b", "") is other
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert store.has(b"a", "")
    store.check_idle()


async def test_nothing_is_evicted_where_what_is_pinned_leaves_no_gap_that_is_large_enough(store):
    """Five rows are free between pinned ones at most, though fourteen are in all."""
    sizes = {b"a": 5, b"pin": 1, b"b": 5, b"another": 1, b"c": 4}
    entries = {key: await put(store, key, tokens) for key, tokens in sizes.items()}
    with store.pinned(entries[b"another"].allocation):
        with store.pinned(entries[b"pin"].allocation):
            waiting = asyncio.create_task(store.allocate(6))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert len(store) == len(entries)
        allocation = await waiting
        assert [key for key in sizes if store.has(key, "")] == [b"b", b"another", b"c"], "the oldest, and no more"
        store.abandon(allocation)
    store.check_idle()


async def test_an_allocation_that_is_cancelled_as_it_is_granted_comes_back(store):
    entry = await put(store, b"a", 16)
    store.pin(entry.allocation)
    waiting = asyncio.create_task(store.allocate(16))
    await asyncio.sleep(0)
    store.unpin(entry.allocation)
    asyncio.get_running_loop().call_soon(waiting.cancel)  # just after it is granted
    await asyncio.gather(waiting, return_exceptions=True)
    store.check_idle()
    assert store.used == 0


class Readers:
    """Hits that overtake: in each step another entry of one row begins to be read, for `steps` steps."""

    def __init__(self, store: EmbeddingStore, steps: int) -> None:
        self.store = store
        self.reading: deque[tuple[Entry, bytes]] = deque()
        self._steps = steps

    async def put_all(self) -> None:
        for number in range(self.store.capacity // ROW):
            entry = await put(self.store, b"%d" % number, 1)
            self.store.buffer.slice(entry.span)[:] = b"%02d" % number * (ROW // 2)

    async def step(self, number: int) -> None:
        """Numbers far from each other, so that what is read is spread over the store."""
        if entry := self.store.find(b"%d" % (number * 7 % 16), ""):
            self.store.pin(entry.allocation)
            self.reading.append((entry, bytes(self.store.buffer.slice(entry.span))))
        if len(self.reading) > self._steps or (self.reading and entry is None):
            self._stop_reading()
        await turns()
        self.store.check_integrity()

    def _stop_reading(self) -> None:
        entry, rows = self.reading.popleft()
        assert bytes(self.store.buffer.slice(entry.span)) == rows, "what is read was overwritten"
        self.store.unpin(entry.allocation)

    async def stop(self) -> None:
        while self.reading:
            self._stop_reading()
        await turns()


async def test_large_rows_are_not_overtaken_for_ever_and_small_ones_behind_them_get_on(store, monkeypatch):
    readers, searches = Readers(store, 6), 0
    window = eviction.window

    def counted(*args):
        nonlocal searches
        searches += 1
        return window(*args)

    await readers.put_all()
    for number in range(6):
        await readers.step(number)
    monkeypatch.setattr(eviction, "window", counted)
    large, small = (asyncio.create_task(store.allocate(tokens)) for tokens in (8, 1))
    await turns()
    assert not large.done()
    assert not small.done(), "first come, first served"
    for number in range(6, 60):
        await readers.step(number)
        if small.done():
            store.buffer.slice(small.result().span)[:] = bytes(ROW)
        if large.done():
            break
    store.buffer.slice(large.result().span)[:] = bytes(8 * ROW)
    assert small.done()
    assert readers.reading, "nothing had to be idle for it"
    assert searches <= 6, "not one for each that reads"
    await readers.stop()
    store.abandon(large.result())
    store.abandon(small.result())
    store.check_idle()


async def reserving(store: EmbeddingStore, tokens: int) -> asyncio.Task:
    """One that has waited until room is reserved for it."""
    waiting = asyncio.create_task(store.allocate(tokens))
    await turns()
    passing = [asyncio.create_task(store.allocate(1)) for _ in range(4)]
    await turns()
    assert not waiting.done()
    for each in passing:
        if each.done():
            store.abandon(each.result())
        each.cancel()
    await asyncio.gather(*passing, return_exceptions=True)
    return waiting


async def test_what_is_reserved_is_read_to_its_end_and_found_by_nobody(store):
    entries = [await put(store, key, 4) for key in (b"a", b"b", b"c", b"d")]
    for entry in (entries[0], entries[2], entries[2]):
        store.pin(entry.allocation)
    waiting = await reserving(store, 8)
    assert [store.has(key, "") for key in (b"a", b"b", b"c", b"d")] == [False, False, True, False], "the fewest readers"
    again = asyncio.create_task(put(store, b"a", 4))
    await turns()
    assert store.find(b"a", "") is again.result(), "it is computed again meanwhile"
    assert again.result().span.offset == entries[3].span.offset
    assert not waiting.done()
    store.unpin(entries[0].allocation)
    allocation = await waiting
    assert allocation.span == Range(0, 8 * ROW)
    store.abandon(allocation)
    for _ in range(2):
        store.unpin(entries[2].allocation)
    store.check_idle()


async def test_who_leaves_gives_back_what_was_reserved_but_for_what_is_read(store):
    entries = [await put(store, key, 4) for key in (b"a", b"b", b"c", b"d")]
    for entry in (entries[0], entries[2]):
        store.pin(entry.allocation)
        store.buffer.slice(entry.span)[:] = b"r" * 4 * ROW
    waiting = await reserving(store, 8)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    store.check_integrity()
    others = [await store.allocate(4) for _ in range(2)]
    for other in others:
        store.buffer.slice(other.span)[:] = bytes(4 * ROW)
    assert all(bytes(store.buffer.slice(entries[at].span)) == b"r" * 4 * ROW for at in (0, 2))
    for allocation in (*others, entries[0].allocation, entries[2].allocation):
        store.unpin(allocation)
    store.check_idle()


async def test_who_leaves_just_before_the_last_reader_is_given_nothing(store):
    entry = await put(store, b"a", 10)
    store.pin(entry.allocation)
    waiting = await reserving(store, 16)
    store.unpin(entry.allocation)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    store.check_idle()
    assert store.used == 0


async def test_rows_that_are_written_where_room_is_reserved_are_trimmed_and_read_but_not_kept(store):
    writing = await store.allocate(10)
    waiting = await reserving(store, 16)
    store.trim(writing, 6)
    entry = store.commit(writing, header(b"a", 6), "")
    store.check_integrity()
    assert not store.has(b"a", "")
    with store.pinned(entry.allocation):
        store.unpin(entry.allocation)
        await turns()
        assert not waiting.done()
    store.abandon(await waiting)
    store.check_idle()


async def test_many_of_all_sizes_over_a_small_store_all_get_their_turn(store):
    draw, served = random.Random(5), 0

    async def serve(number: int) -> None:
        nonlocal served
        name, tokens = draw.randrange(40), draw.choice([1, 1, 1, 2, 3, 8, 14])
        entry = store.find(b"%d %d" % (name, tokens), "")
        if entry is not None:
            store.pin(entry.allocation)
            allocation = entry.allocation
        else:
            allocation = await store.allocate(tokens)
            store.buffer.slice(allocation.span)[:] = bytes([1 + name]) * allocation.span.size
        try:
            for _ in range(draw.randrange(6)):
                await asyncio.sleep(0)
            store.check_integrity()
            if entry is None and number % 5 == 0 and tokens > 1:
                store.trim(allocation, tokens - 1)
            elif entry is None and not store.has(b"%d %d" % (name, tokens), ""):
                store.commit(allocation, header(b"%d %d" % (name, tokens), tokens), "")
            for _ in range(draw.randrange(6)):
                await asyncio.sleep(0)
            assert set(store.buffer.slice(allocation.span)) == {1 + name}, "rows were overwritten"
        finally:
            store.unpin(allocation)
        served += 1

    tasks = [asyncio.create_task(serve(number)) for number in range(400)]
    for task in draw.sample(tasks, 50):
        await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 180)
    assert {type(result) for result in results if result is not None} <= {asyncio.CancelledError}
    assert served >= 350
    store.check_idle()


async def test_a_flush_leaves_what_is_being_read(store):
    reading, _ = await put(store, b"a", 2), await put(store, b"b", 3)
    with store.pinned(reading.allocation):
        assert list(store.flush_in_parts()) == [(1, 3 * ROW)]
        assert store.has(b"a", "")
    assert list(store.flush_in_parts()) == [(1, 2 * ROW)]
    assert store.used == 0


async def test_others_use_the_store_between_the_parts_of_a_flush(store):
    for key in (b"a", b"b", b"c", b"d"):
        await put(store, key, 2)
    parts = store.flush_in_parts(2)
    assert next(parts) == (2, 4 * ROW)
    assert [key for key in (b"a", b"b", b"c", b"d") if store.has(key, "")] == [b"a", b"b"]
    await put(store, b"e", 2)
    with store.pinned(store.find(b"a", "").allocation):
        assert list(parts) == [(1, 2 * ROW)]
    assert [store.has(key, "") for key in (b"a", b"b", b"e")] == [True, False, True]
    assert list(store.flush_in_parts()) == [(2, 4 * ROW)]
    store.check_idle()


async def test_memory_is_given_back_by_a_thread_while_nobody_else_has_it(store, monkeypatch):
    kept = await put(store, b"a", 2)
    store.buffer.slice(kept.span)[:] = b"\1" * kept.span.size
    go_on, emptied = threading.Semaphore(0), []

    def slowly(span: Range) -> None:
        assert go_on.acquire(timeout=180)
        emptied.append(span)
        store.buffer.view[span.offset : span.end] = bytes(span.size)
        assert threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr(store.buffer, "discard", slowly)
    shrinking = asyncio.create_task(store.shrink())
    await turns()
    assert store.used == store.capacity
    waiting = asyncio.create_task(store.allocate(3))
    await turns()
    store.check_integrity()
    assert not waiting.done()
    assert store.has(b"a", ""), "what must only be waited for pushes nothing out"
    go_on.release()
    allocation = await waiting
    store.buffer.slice(allocation.span)[:] = b"\2" * allocation.span.size
    go_on.release(3)
    await shrinking
    assert [(span.offset // ROW, span.size // ROW) for span in emptied] == [(2, 4), (6, 4), (10, 4), (14, 2)]
    assert bytes(store.buffer.slice(kept.span)) == b"\1" * kept.span.size
    assert bytes(store.buffer.slice(allocation.span)) == b"\2" * allocation.span.size
    store.abandon(allocation)
    store.check_idle()


async def test_who_leaves_while_memory_is_given_back_leaves_nothing(store, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(store.buffer, "discard", lambda _: go_on.wait(180))
    shrinking = asyncio.create_task(store.shrink())
    await turns()
    shrinking.cancel()
    await turns()
    assert not shrinking.done(), "a thread is still at it"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await shrinking
    store.check_idle()
    assert store.used == 0


class Machine(RuleBasedStateMachine):
    """Reserves, commits, reads and flushes in any order, and knows what every entry must hold."""

    allocations = Bundle("allocations")
    reading = Bundle("reading")
    reading_early = Bundle("reading early")

    def __init__(self) -> None:
        super().__init__()
        self.buffer = SharedBuffer.create("test", 40 * ROW)
        self.store = EmbeddingStore(self.buffer, ROW)
        self.number = 0
        self.written: dict[bytes, bytes] = {}
        self.pins: dict[bytes, int] = {}
        self.committed: set[bytes] = set()

    def teardown(self) -> None:
        self.store.check_integrity()
        self.buffer.close()

    @rule(target=allocations, tokens=st.integers(1, 20))
    def allocate(self, tokens):
        request, entries = self.store.allocate(tokens), len(self.store)
        try:
            request.send(None)
        except StopIteration as granted:
            return self._written(granted.value, tokens)
        with pytest.raises(asyncio.CancelledError):
            request.throw(asyncio.CancelledError())  # it would have to wait: its caller goes away
        assert len(self.store) == entries, "something was evicted in vain"
        return multiple()

    def _written(self, allocation, tokens):
        self.number += 1
        key = self.number.to_bytes(32, "big")
        self.written[key] = bytes([self.number % 251]) * allocation.span.size
        self.buffer.slice(allocation.span)[:] = self.written[key]
        self.pins[key] = 1
        return allocation, tokens, key

    @rule(target=reading, held=consumes(allocations))
    def commit(self, held):
        allocation, tokens, key = held
        self.committed.add(key)
        return self.store.commit(allocation, header(key, tokens), "")

    @rule(held=consumes(allocations))
    def abandon(self, held):
        self.pins[held[2]] -= 1
        self.store.abandon(held[0])

    @rule(target=reading_early, held=allocations)
    def read_early(self, held):
        allocation, _, key = held
        self.store.pin(allocation)
        self.pins[key] += 1
        return allocation, key

    @rule(early=consumes(reading_early))
    def stop_reading_early(self, early):
        allocation, key = early
        assert bytes(self.buffer.slice(allocation.span)) == self.written[key], "somebody else was given this allocation"
        self.pins[key] -= 1
        self.store.unpin(allocation)

    @rule(target=reading, number=st.integers(1, 30))
    def read(self, number):
        entry = self.store.find(number.to_bytes(32, "big"), "")
        if entry is None:
            return multiple()
        self.store.pin(entry.allocation)
        self.pins[entry.header.key] += 1
        return entry

    @rule(entry=consumes(reading))
    def stop_reading(self, entry):
        assert bytes(self.buffer.slice(entry.span)) == self.written[entry.header.key]
        self.pins[entry.header.key] -= 1
        self.store.unpin(entry.allocation)

    @rule()
    def flush(self):
        list(self.store.flush_in_parts())

    @invariant()
    def sound(self):
        self.store.check_integrity()
        assert not self.store._waiters
        assert self.store.used <= self.store.capacity
        for key in self.committed:
            assert not self.pins[key] or self.store.has(key, ""), "a pinned entry was evicted"


async def test_any_order_of_events_keeps_the_store_sound():
    """`allocate` needs a running loop for its futures; the machine runs inside one."""
    case = Machine.TestCase()
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case.runTest()
