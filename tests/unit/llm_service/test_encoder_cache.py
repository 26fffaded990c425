"""The row arena: who gets a place, who waits, what is kept, and that every place comes back."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import InvalidInput, Unavailable
from common.media.item import Grid, Header, Modality
from common.rows.wire import DType, RowLayout
from common.shm import eviction
from llm_service.encoders.encoder_cache import CacheEntry, EncoderCache

LAYOUT = RowLayout(levels=1, width=16, dtype=DType.FLOAT32)  # rows of 64 bytes
ROWS = 16


def header(name: str, tokens: int) -> Header:
    return Header(hashlib.sha256(name.encode()).digest(), Modality.IMAGE, Grid(1, 2, 2 * tokens), tokens)


@pytest.fixture
async def cache() -> AsyncIterator[EncoderCache]:
    cache = EncoderCache(ROWS * LAYOUT.row_bytes, LAYOUT)
    yield cache
    cache.check_idle()
    cache.close()


def land(cache: EncoderCache, entry: CacheEntry, data: bytes) -> None:
    begin = entry.landed * LAYOUT.row_bytes
    cache.view(entry)[begin : begin + len(data)] = data
    cache.advance(entry, len(data) // LAYOUT.row_bytes, 1)


def fill(cache: EncoderCache, entry: CacheEntry, value: int = 1) -> None:
    land(cache, entry, bytes([value]) * (entry.header.tokens - entry.landed) * LAYOUT.row_bytes)


async def remember(cache: EncoderCache, *names: tuple[str, int]) -> None:
    """Leaves whole, unused entries behind."""
    for name, tokens in names:
        (entry,) = await cache.acquire([header(name, tokens)])
        fill(cache, entry)
        cache.release(entry)


def waiting(cache: EncoderCache, *headers: Header) -> asyncio.Task[list[CacheEntry]]:
    return asyncio.create_task(cache.acquire(headers))


async def run_ready_tasks() -> None:
    """Lets every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_rows_land_where_the_entry_says_and_watchers_hear_of_each_receiver(cache: EncoderCache) -> None:
    (entry,) = await cache.acquire([header("a", 4)])
    heard: list[int] = []
    entry.watchers.append(lambda entry: heard.append(entry.landed))
    land(cache, entry, b"\1" * 64)
    land(cache, entry, b"\2" * 192)
    assert heard == [1, 4]
    assert entry.complete
    assert bytes(cache.buffer.slice(entry.place)) == b"\1" * 64 + b"\2" * 192
    assert cache.counters.received == 4
    cache.release(entry)


async def test_two_requests_for_one_item_share_its_entry(cache: EncoderCache) -> None:
    (first,) = await cache.acquire([header("a", 4)])
    first.filler = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    second, third = await cache.acquire([header("a", 4), header("a", 4)])
    assert first is second is third
    assert cache.counters.hits == 2
    fill(cache, first)
    for _ in range(3):
        cache.release(first)
    first.filler.cancel()


async def test_a_whole_entry_is_found_again_after_its_release(cache: EncoderCache) -> None:
    await remember(cache, ("a", 4))
    (again,) = await cache.acquire([header("a", 4)])
    assert again.complete
    cache.release(again)
    assert cache.knows(again.header.key)


async def test_an_unfinished_entry_that_no_one_wants_any_more_stops_its_filler_and_goes(
    cache: EncoderCache,
) -> None:
    (entry,) = await cache.acquire([header("a", 4)])
    entry.filler = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    land(cache, entry, b"\1" * 64)
    cache.release(entry)
    await run_ready_tasks()
    assert entry.filler.cancelled()
    assert not cache.knows(entry.header.key)
    assert cache.used_bytes == 0


async def test_the_longest_unused_entry_makes_room_and_no_other(cache: EncoderCache) -> None:
    await remember(cache, ("a", 4), ("b", 4), ("c", 8))
    (again,) = await cache.acquire([header("a", 4)])
    cache.release(again)
    (new,) = await cache.acquire([header("d", 4)])
    assert [cache.knows(header(name, 1).key) for name in "abc"] == [True, False, True]
    fill(cache, new)
    cache.release(new)


async def test_entries_in_use_are_never_evicted_a_request_waits_its_turn(cache: EncoderCache) -> None:
    (held,) = await cache.acquire([header("a", 10)])
    late = waiting(cache, header("b", 10))
    await run_ready_tasks()
    assert not late.done()
    fill(cache, held)
    cache.release(held)
    (entry,) = await late
    assert not cache.knows(held.header.key)
    cache.release(entry)


class Looked(dict[bytes, CacheEntry]):
    """Counts how often an entry is looked at."""

    times = 0

    def __getitem__(self, key: bytes) -> CacheEntry:
        self.times += 1
        return super().__getitem__(key)


async def test_room_is_made_without_a_look_at_each_cached_entry(cache: EncoderCache) -> None:
    """There may be ten thousand, and the event loop waits."""
    await remember(cache, *((str(number), 1) for number in range(ROWS)))
    looked = cache._entries = Looked(cache._entries)
    await remember(cache, ("new", 1), ("another", 2))
    assert looked.times <= ROWS // 2, "a few for each that goes"
    assert not cache.knows(header("0", 1).rows_key)
    assert cache.knows(header("3", 1).rows_key)


async def test_room_is_looked_for_again_only_where_what_is_given_back_leaves_enough(
    cache: EncoderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixteen rows each fourth stays in use until six of them side by side are wanted."""
    await remember(cache, *((str(number), 1) for number in range(ROWS)))
    held = [(await cache.acquire([header(str(number), 1)]))[0] for number in (*range(0, ROWS, 4), 6)]
    searches, window = 0, eviction.window

    def counted(*args: Any) -> list[int]:
        nonlocal searches
        searches += 1
        return window(*args)

    monkeypatch.setattr(eviction, "window", counted)
    late = waiting(cache, header("wide", 6))
    await run_ready_tasks()
    assert searches == 1
    for _ in range(8):
        assert cache.acquire_now([header("6", 1)]) == [held[-1]]
        cache.release(held[-1])
    for entry in (held[-1], held[0]):  # four are idle side by side from then on
        cache.release(entry)
        await run_ready_tasks()
    assert not late.done()
    assert searches == 1
    cache.release(held[1])
    await run_ready_tasks()
    assert late.done()
    assert searches == 2
    for entry in (*late.result(), *held[2:-1]):
        cache.release(entry)


async def test_nothing_is_evicted_in_vain(cache: EncoderCache) -> None:
    await remember(cache, ("a", 4))
    (held,) = await cache.acquire([header("b", 4)])
    await remember(cache, ("c", 4))
    late = waiting(cache, header("d", 12))
    await run_ready_tasks()
    assert [cache.knows(header(name, 4).key) for name in "abc"] == [True, True, True]
    fill(cache, held)
    cache.release(held)
    (entry,) = await late
    cache.release(entry)


async def test_those_who_wait_are_served_first_come_first_served(cache: EncoderCache) -> None:
    (held,) = await cache.acquire([header("a", 10)])
    large = waiting(cache, header("large", 16))
    small = waiting(cache, header("small", 2))
    await run_ready_tasks()
    assert not small.done(), "a small request overtook a large one"
    cache.release(held)
    (entry,) = await large
    await run_ready_tasks()
    assert not small.done()
    cache.release(entry)
    cache.release((await small)[0])


async def test_who_wants_no_place_waits_for_nobody(cache: EncoderCache) -> None:
    (held,) = await cache.acquire([header("a", 10)])
    large = waiting(cache, header("large", 16))
    await run_ready_tasks()
    assert cache.acquire_now([]) == []
    assert cache.acquire_now([header("small", 2)]) is None
    cache.release(held)
    cache.release((await large)[0])


async def test_who_wants_what_is_here_goes_before_one_that_waits_for_room_but_not_for_ever(cache: EncoderCache) -> None:
    (held,) = await cache.acquire([header("a", 10)])
    large = waiting(cache, header("large", 16))
    await run_ready_tasks()
    for _ in range(64):
        again = cache.acquire_now([header("a", 10)])
        assert again == [held]
        cache.release(held)
    assert cache.acquire_now([header("a", 10)]) is None
    cache.release(held)
    (entry,) = await large
    another = waiting(cache, header("b", 4))
    await run_ready_tasks()
    assert cache.acquire_now([header("large", 16)]) == [entry]
    cache.release(entry)
    cache.release(entry)
    cache.release((await another)[0])


async def test_one_who_leaves_while_waiting_blocks_nobody(cache: EncoderCache) -> None:
    (held,) = await cache.acquire([header("a", 10)])
    leaver = waiting(cache, header("b", 10))
    after = waiting(cache, header("c", 4))
    await run_ready_tasks()
    leaver.cancel()
    await run_ready_tasks()
    assert after.done()
    for entry in (held, *after.result()):
        cache.release(entry)


async def test_the_items_of_a_request_are_reserved_together_or_not_at_all(cache: EncoderCache) -> None:
    (held,) = await cache.acquire([header("a", 6)])
    late = waiting(cache, header("b", 8), header("c", 8))
    await run_ready_tasks()
    assert not late.done()
    assert cache.used_bytes == 6 * 64, "a request that waits holds something"
    cache.release(held)
    for entry in await late:
        cache.release(entry)


async def test_what_can_never_fit_is_refused_at_once(cache: EncoderCache) -> None:
    with pytest.raises(InvalidInput) as refused:
        await cache.acquire([header("a", 9), header("b", 8)])
    assert refused.value.reason == "EMBEDDINGS_TOO_LARGE"
    assert refused.value.retry_after is None


async def test_one_item_twice_needs_its_room_once(cache: EncoderCache) -> None:
    entries = await cache.acquire([header("a", 16), header("a", 16)])
    assert entries[0] is entries[1]
    for entry in entries:
        cache.release(entry)


async def test_a_cached_item_in_the_middle_of_the_arena_does_not_block_its_own_request_for_ever(
    cache: EncoderCache,
) -> None:
    """Both fit, but not while the cached one cuts the free space in two."""
    await remember(cache, ("left", 6), ("middle", 4), ("right", 6))
    entries = await asyncio.wait_for(cache.acquire([header("middle", 4), header("wide", 12)]), 180)
    for entry in entries:
        fill(cache, entry)
        cache.release(entry)


async def test_rows_that_do_not_fill_a_cache_line_cannot_make_a_request_wait_for_ever() -> None:
    narrow = RowLayout(levels=1, width=1, dtype=DType.FLOAT32)
    cache = EncoderCache(256, narrow)
    wide = [header(name, 17) for name in "abc"]  # 68 bytes each: 204 in all, but two cache lines each
    with pytest.raises(InvalidInput):
        await asyncio.wait_for(cache.acquire(wide), 180)
    cache.check_idle()
    cache.close()


async def test_a_failed_entry_is_told_to_those_who_wait_and_not_given_to_others(cache: EncoderCache) -> None:
    (entry,) = await cache.acquire([header("a", 4)])
    told: list[CacheEntry] = []
    entry.watchers.append(told.append)
    cache.forget(entry)
    entry.fail(Unavailable("gone"))
    assert told == [entry]
    (other,) = await cache.acquire([header("a", 4)])
    assert other is not entry
    assert other.error is None
    cache.release(entry)
    fill(cache, other)
    cache.release(other)


async def test_an_entry_that_failed_after_its_last_row_is_dropped_whole(cache: EncoderCache) -> None:
    (entry,) = await cache.acquire([header("a", 4)])
    fill(cache, entry)
    cache.forget(entry)
    entry.fail(Unavailable("the stream broke at its end"))
    cache.release(entry)
    assert cache.used_bytes == 0
    cache.flush()


async def test_flush_keeps_what_is_in_use(cache: EncoderCache) -> None:
    await remember(cache, ("a", 4), ("b", 4))
    (held,) = await cache.acquire([header("b", 4)])
    assert cache.flush() == 4 * 64
    assert cache.used_bytes == 4 * 64
    cache.release(held)


async def test_many_requests_over_a_small_arena_all_get_their_turn(cache: EncoderCache) -> None:
    rng = random.Random(3)
    turns = 0

    async def request(number: int) -> None:
        nonlocal turns
        names = rng.sample(range(12), rng.randrange(1, 4))
        wanted = [header(f"item {name}", 1 + name % 5) for name in names]
        entries = await cache.acquire(wanted)
        for entry, asked in zip(entries, wanted, strict=True):
            assert entry.header.key == asked.key
            if entry.filler is None and not entry.complete and not entry.landed:
                fill(cache, entry, 1 + entry.header.key[0] % 255)
        try:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            for entry in entries:
                assert set(cache.buffer.slice(entry.place)) == {1 + entry.header.key[0] % 255}, "rows were overwritten"
        finally:
            for entry in entries:
                cache.release(entry)
        turns += 1

    tasks = [asyncio.create_task(request(number)) for number in range(300)]
    for task in rng.sample(tasks, 40):
        await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 180)
    assert {type(result) for result in results if result is not None} <= {asyncio.CancelledError}
    assert turns >= 260


async def test_what_is_to_be_kept_makes_room_last_of_all() -> None:
    kept = {header("warm", 4).key}
    cache = EncoderCache(ROWS * LAYOUT.row_bytes, LAYOUT, retained=kept.__contains__)
    await remember(cache, ("warm", 4), ("cold", 4), ("colder", 4))
    (entry,) = await cache.acquire([header("new", 12)])
    assert [cache.knows(header(name, 4).key) for name in ("warm", "cold", "colder")] == [True, False, False]
    cache.release(entry)
    (entry,) = await cache.acquire([header("newer", 16)])
    assert not cache.knows(header("warm", 4).key), "but it goes"
    cache.release(entry)
    cache.check_idle()
    cache.close()


async def test_requests_that_cannot_be_here_together_all_get_their_turn(cache: EncoderCache) -> None:
    """Two items each, any two requests too large for the arena: none waits for ever, and none holds half of its own."""
    rng = random.Random(9)
    served: list[int] = []

    async def serve(number: int) -> None:
        entries = await cache.acquire([header(f"{number}/1", rng.randrange(5, 8)), header(f"{number}/2", 8)])
        for entry in entries:
            if not entry.complete:
                fill(cache, entry)
        await asyncio.sleep(0)
        for entry in entries:
            cache.release(entry)
        served.append(number)

    async with asyncio.timeout(180):
        await asyncio.gather(*map(serve, range(200)))
    assert sorted(served) == list(range(200))


async def test_everybody_hears_of_a_place_before_new_rows_can_land_there() -> None:
    told: list[int] = []
    cache = EncoderCache(ROWS * LAYOUT.row_bytes, LAYOUT, on_place=lambda place: told.append(place.offset))
    await remember(cache, ("a", 8), ("b", 8), ("a", 8), ("c", 8))
    assert told == [0, 8 * LAYOUT.row_bytes, 8 * LAYOUT.row_bytes]
    cache.check_idle()
    cache.close()


async def test_with_the_mirrors_go_the_rows_that_were_in_them(cache: EncoderCache) -> None:
    """One entry is cache, one is being brought for somebody, and one was never in a mirror."""
    await remember(cache, ("here", 4))
    (cached,) = await cache.acquire([header("mirrored", 4)])
    cache.mirror(cached)
    fill(cache, cached)
    cache.release(cached)
    (awaited,) = await cache.acquire([header("awaited", 4)])
    awaited.filler = asyncio.create_task(asyncio.Event().wait())
    heard: list[CacheEntry] = []
    awaited.watchers.append(heard.append)
    cache.mirror(awaited)
    cache.advance(awaited, 2, 3)
    cache.lose_mirrors()
    assert isinstance(awaited.error, Unavailable)
    assert heard[-1] is awaited
    assert [cache.knows(header(name, 4).key) for name in ("here", "mirrored", "awaited")] == [True, False, False]
    with pytest.raises(asyncio.CancelledError):
        await awaited.filler
    cache.release(awaited)
    cache.check_idle()


async def filled_by_a_thread(entry: CacheEntry) -> asyncio.Event:
    """Gives an entry a filler that, once cancelled, ends when the event is set: as one that waits for its thread."""
    may_end = asyncio.Event()

    async def copies() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    entry.filler = asyncio.create_task(copies())
    await run_ready_tasks()
    return may_end


async def test_a_place_is_given_to_nobody_while_the_one_who_filled_it_may_still_write(cache: EncoderCache) -> None:
    (entry,) = await cache.acquire([header("a", ROWS)])
    may_end = await filled_by_a_thread(entry)
    cache.release(entry)
    next_one = waiting(cache, header("b", ROWS))
    await run_ready_tasks()
    assert not next_one.done()
    may_end.set()
    cache.release((await asyncio.wait_for(next_one, 180))[0])


async def test_a_cache_is_drained_when_the_last_one_who_filled_a_place_can_write_no_more(cache: EncoderCache) -> None:
    (entry,) = await cache.acquire([header("a", ROWS)])
    may_end = await filled_by_a_thread(entry)
    cache.release(entry)
    settling = asyncio.create_task(cache.drain())
    await run_ready_tasks()
    assert not settling.done()
    may_end.set()
    await asyncio.wait_for(settling, 180)
    cache.check_idle()
    await cache.drain()
