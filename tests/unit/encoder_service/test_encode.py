"""The life of an item, with fake decoders and workers: shared flights, and nothing left wherever it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from common.errors import Exhausted, Internal, InvalidInput, NotFound, TwinlensError, Unavailable
from common.media.item import Embedding, Grid, Header, Key, Modality, Options, Pixels, Url
from common.rows.wire import DType
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.item import Item
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.engines import LAYOUT, PICTURES, SEEN, encoder, item, rows
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, served, turns


async def test_identical_items_in_flight_are_computed_once(monkeypatch):
    async with encoder(monkeypatch) as (made, worker):
        assert not any(await asyncio.gather(*(rows(made, item()) for _ in range(50))))
        assert len(worker.batches) == 1
        assert (made.totals.hits, made.totals.misses) == (49, 1)
        assert await rows(made, item())
        assert len(worker.batches) == 1


async def test_ready_made_rows_need_no_worker(monkeypatch):
    data = bytes(4 * LAYOUT.row_bytes)
    given = Embedding(data, DType.FLOAT32, 4, 1, 16, Grid(1, 4, 4))
    async with encoder(monkeypatch) as (made, worker):
        with monkeypatch.context() as patched:
            patched.setattr(Dispatcher, "check", raising(Unavailable("no worker", reason="NO_WORKER")))
            with pytest.raises(Unavailable):
                await rows(made, item())
            assert not await rows(made, item(source=given))
        assert await rows(made, item(source=given))
        assert worker.batches == []


def raising(error):
    def raises(*_):
        raise error

    return raises


async def test_what_waits_while_a_worker_is_busy_goes_in_one_batch(monkeypatch):
    async with encoder(monkeypatch, answers=None, staging=1 << 18) as (made, worker):
        waiting = [asyncio.create_task(rows(made, item(0)))]
        await turns(30)
        waiting += [asyncio.create_task(rows(made, item(number))) for number in range(1, 6)]
        await turns(30)
        worker.say(DONE)
        await turns()
        assert [len(batch.pieces) for batch in worker.batches] == [1, 5]
        worker.say(DONE)
        await asyncio.gather(*waiting)


async def test_a_header_alone_decodes_and_computes_nothing_until_someone_wants_rows(monkeypatch):
    decoders = FakeDecoders(SEEN)
    async with encoder(monkeypatch, decoders=decoders) as (made, worker):
        async with made.ticket(item(), rows=False) as ticket:
            assert (await made.resolve(ticket)).tokens == 4
            await turns()
            assert (decoders.jobs, worker.batches) == (1, [])
            await rows(made, item())
            assert decoders.jobs == 2
        await turns()
        assert len(worker.batches) == 1


async def test_the_last_one_to_leave_before_a_worker_begins_ends_the_flight(monkeypatch):
    decoders = FakeDecoders(SEEN, turns=100)
    async with encoder(monkeypatch, decoders=decoders) as (made, worker):
        waiting = [asyncio.create_task(rows(made, item())) for _ in range(3)]
        await turns()
        for task in waiting[:2]:
            task.cancel()
        await turns()
        assert made.load().queued_items == 1
        waiting[2].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await turns()
        assert (made.load().queued_items, worker.batches) == (0, [])
        made.check_idle()


async def test_no_worker_is_given_what_the_last_one_has_left_in_the_same_moment(monkeypatch):
    async with encoder(monkeypatch, answers=None) as (made, worker):
        async with made.ticket(item(), rows=True) as ticket:
            await made.resolve(ticket)
            while not made.pipeline.dispatcher.waiting:
                await turns(1)
        await turns()
        assert worker.batches == []
        made.check_idle()


async def test_what_a_worker_has_begun_is_kept_for_the_next_caller(monkeypatch):
    async with encoder(monkeypatch, answers=None) as (made, worker):
        waiting = asyncio.create_task(rows(made, item()))
        await turns(30)
        assert len(worker.batches) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        worker.say(DONE)
        await turns()
        made.check_idle()
        assert await rows(made, item())


async def test_a_higher_priority_goes_first_and_is_shared_with_who_was_there_before(monkeypatch):
    order: list[int] = []

    async def wait(number: int, priority: int) -> None:
        await rows(made, item(number, priority=priority))
        order.append(number)

    async with encoder(monkeypatch, answers=None, max_units=1, staging=1 << 18) as (made, worker):
        waiting = []
        for number, priority in ((0, 0), (1, 0), (2, 0), (3, 5), (2, 9)):
            waiting.append(asyncio.create_task(wait(number, priority)))
            await turns(30)
        await served(worker, waiting)
    assert order == [0, 2, 2, 3, 1]


async def test_a_key_alone_joins_what_is_in_flight_for_the_same_tenant(monkeypatch):
    async with encoder(monkeypatch, answers=None) as (made, worker):
        waiting = asyncio.create_task(rows(made, item(salt="mine")))
        await turns(30)
        ((key, *_),) = made._flights
        by_key = asyncio.create_task(rows(made, item(source=Key(key), salt="mine")))
        with pytest.raises(NotFound):
            await rows(made, item(source=Key(key), salt="theirs"))
        worker.say(DONE)
        await asyncio.gather(waiting, by_key)


async def test_an_item_too_many_is_refused_at_once(monkeypatch):
    async with encoder(monkeypatch, answers=None, items=2) as (made, worker):
        waiting = [asyncio.create_task(rows(made, item(number))) for number in range(2)]
        await turns(30)
        with pytest.raises(Exhausted) as refused:
            await rows(made, item(2))
        assert refused.value.retry_after
        await served(worker, waiting)
        await served(worker, [asyncio.create_task(rows(made, item(2)))])


class GatedFetcher:
    """Every address gives the same picture, whose size is known at once, when the test lets it."""

    def __init__(self) -> None:
        self.downloads, self.go_on = 0, asyncio.Event()

    def check(self, *_: object) -> None:
        pass

    async def fetch(self, address, max_bytes, field, caller, on_size) -> bytearray:
        self.downloads += 1
        on_size(len(PICTURES[0]))
        await self.go_on.wait()
        return bytearray(PICTURES[0])


async def header(made, wanted: Item) -> Header:
    async with made.ticket(wanted, rows=False) as ticket:
        return await made.resolve(ticket)


async def test_a_download_counts_once_for_all_who_wait_for_it_and_what_there_is_no_room_for_is_refused_at_once(
    monkeypatch,
):
    fetcher, size = GatedFetcher(), len(PICTURES[0]) + len(PICTURES[1]) // 2
    async with encoder(monkeypatch, fetcher=fetcher, size=size) as (made, _):
        waiting = [asyncio.create_task(header(made, item(source=Url("http://a.test/")))) for _ in range(3)]
        await turns()
        assert (fetcher.downloads, made._admission.bytes) == (1, len(PICTURES[0]))
        for wanted, field in ((PICTURES[1], "items[0]"), (Url("http://b.test/"), "items[0].url")):
            with pytest.raises(Exhausted) as refused:
                await header(made, item(source=wanted))
            assert (refused.value.reason, refused.value.field) == ("QUEUE_FULL", field)
        for left in (1, 1, 0):
            leaver = waiting.pop()
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
            assert made._admission.bytes == left * len(PICTURES[0])
        fetcher.go_on.set()
        await header(made, item(1))


async def test_a_download_that_others_have_no_room_beside_is_let_in_however_many_wait_for_it(monkeypatch):
    fetcher = GatedFetcher()
    async with encoder(monkeypatch, fetcher=fetcher, size=len(PICTURES[0]) // 2) as (made, _):
        waiting = [asyncio.create_task(rows(made, item(source=Url("http://a.test/")))) for _ in range(2)]
        await turns()
        fetcher.go_on.set()
        await asyncio.gather(*waiting)


async def test_content_of_which_several_items_are_made_counts_once_until_the_last_of_them_has_ended(monkeypatch):
    fetcher, source = GatedFetcher(), Url("http://a.test/")
    async with encoder(monkeypatch, answers=None, max_units=1, fetcher=fetcher) as (made, worker):
        wanted = [item(source=source, options=Options(min_pixels=least)) for least in (784, 785)]
        waiting = [asyncio.create_task(rows(made, each)) for each in wanted]
        await turns()
        fetcher.go_on.set()
        for ended in (0, 1, 2):
            while len(worker.batches) < min(ended + 1, 2):
                await turns(1)
            await turns(30)
            assert (fetcher.downloads, sum(each.done() for each in waiting)) == (1, ended)
            assert made._admission.bytes == (len(PICTURES[0]) if ended < 2 else 0)
            worker.say(DONE)
            await turns(30)


async def test_downloaded_content_counts_while_it_is_hashed_whoever_has_left_meanwhile(monkeypatch):
    fetcher, hashing = GatedFetcher(), asyncio.Event()
    async with encoder(monkeypatch, fetcher=fetcher) as (made, _):
        hashed = made._contents.key

        async def slow_key(wanted: Item) -> bytes:
            await hashing.wait()
            return await hashed(wanted)

        monkeypatch.setattr(made._contents, "key", slow_key)
        waiting = [asyncio.create_task(rows(made, item(source=Url("http://a.test/")))) for _ in range(2)]
        await turns()
        fetcher.go_on.set()
        await turns()
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert made._admission.bytes == len(PICTURES[0])
        hashing.set()
        await waiting[1]
        await turns()
        assert not made._admission.bytes


@pytest.mark.parametrize("leaves", [0, 1])
async def test_content_counts_as_held_until_the_last_one_has_left_whoever_brought_it(monkeypatch, leaves):
    fetcher, size = GatedFetcher(), len(PICTURES[0]) + len(PICTURES[1]) // 2
    async with encoder(monkeypatch, answers=None, fetcher=fetcher, size=size) as (made, worker):
        waiting = [asyncio.create_task(rows(made, item(source=Url("http://a.test/")))) for _ in range(2)]
        await turns(30)
        fetcher.go_on.set()
        while not worker.batches:
            await turns(1)
        waiting[leaves].cancel()
        await asyncio.gather(waiting[leaves], return_exceptions=True)
        assert fetcher.downloads == 1
        with pytest.raises(Exhausted):
            await header(made, item(1))
        worker.say(DONE)
        assert not await waiting[1 - leaves]
        await turns()
        await header(made, item(1))


async def test_content_counts_as_held_while_a_worker_computes_what_nobody_waits_for(monkeypatch):
    size = len(PICTURES[0]) + len(PICTURES[1]) // 2
    async with encoder(monkeypatch, answers=None, size=size) as (made, worker):
        waiting = asyncio.create_task(rows(made, item(0)))
        while not worker.batches:
            await turns(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(Exhausted):
            await header(made, item(1))
        worker.say(DONE)
        await turns()
        await header(made, item(1))


async def test_everyone_who_waits_hears_of_a_failure_and_the_next_one_tries_again(monkeypatch):
    answers = iter([BatchFailed(why="broken"), DONE])
    async with encoder(monkeypatch, answers=lambda _: next(answers)) as (made, _):
        found = await asyncio.gather(*(rows(made, item()) for _ in range(5)), return_exceptions=True)
        assert [type(each) for each in found] == [Internal] * 5
        assert made.totals.failed == 1
        assert not await rows(made, item())


async def test_unreadable_media_fails_its_own_item(monkeypatch):
    broken = FakeDecoders(SEEN, failure=InvalidInput("the media cannot be decoded", field="items[0]"))
    async with encoder(monkeypatch, decoders=broken) as (made, _):
        with pytest.raises(InvalidInput):
            await rows(made, item())


async def test_an_item_that_fails_under_a_known_key_is_named_by_its_place_in_its_own_request(monkeypatch):
    broken = FakeDecoders(SEEN, turns=30, failure=InvalidInput("the media cannot be decoded", field="items[0]"))
    async with encoder(monkeypatch, decoders=broken) as (made, _):
        key = await made._contents.key(item())
        by_content = asyncio.create_task(rows(made, item()))
        await turns()
        known = dataclasses.replace(item(source=Url("data:image/png;base64,", key)), field="items[7]")
        for asking, place in ((asyncio.create_task(rows(made, known)), "items[7]"), (by_content, "items[0]")):
            with pytest.raises(InvalidInput) as failure:
                await asking
            assert failure.value.field == place


async def test_an_unforeseen_failure_is_ours_and_leaves_nothing(monkeypatch):
    async with encoder(monkeypatch, decoders=FakeDecoders(SEEN, failure=LookupError("surprise"))) as (made, _):
        with pytest.raises(Internal) as failure:
            await rows(made, item())
        assert "surprise" not in failure.value.message


@pytest.mark.parametrize(
    ("room", "reason"), [({"store_bytes": 192}, "ROWS_TOO_LARGE"), ({"staging": 16384}, "STAGING_TOO_SMALL")]
)
async def test_what_never_fits_is_refused_before_its_header_leaves_and_before_it_is_decoded(monkeypatch, room, reason):
    decoders = FakeDecoders(SEEN)
    async with encoder(monkeypatch, decoders=decoders, **room) as (made, worker):
        async with made.ticket(item(), rows=True) as ticket:
            with pytest.raises(InvalidInput) as refused:
                await made.resolve(ticket)
        assert (refused.value.reason, refused.value.field) == (reason, "items[0]")
        assert (decoders.jobs, worker.batches) == (1, [])


async def test_two_items_that_do_not_fit_together_go_one_after_the_other(monkeypatch):
    # Each needs 4 rows of 64 bytes in a store of 4 rows.
    async with encoder(monkeypatch, store_bytes=256) as (made, worker):
        await asyncio.gather(*(rows(made, item(number)) for number in range(8)))
        assert len(worker.batches) == 8
        assert made.pipeline.store.used <= made.pipeline.store.capacity


async def test_a_prefetched_item_goes_on_after_its_header(monkeypatch):
    async with encoder(monkeypatch, answers=None) as (made, worker):
        header, cached = await made.prefetch(item())
        assert (header.tokens, cached) == (4, False)
        await turns(30)
        worker.say(DONE)
        await turns()
        assert made.pipeline.store.has(header.key, "")


async def test_pixels_need_no_decoder(monkeypatch):
    decoders = FakeDecoders(SEEN)
    given = Pixels(bytes(5 * 56 * 56 * 3), 5, 56, 56)
    async with encoder(monkeypatch, decoders=decoders, staging=1 << 18) as (made, worker):
        wanted = Item(Modality.VIDEO, given, field="items[0]")
        async with made.ticket(wanted, rows=True) as ticket:
            header = await made.resolve(ticket)
            await ticket.ready()
        assert (header.grid.t, header.timestamps, decoders.jobs) == (3, (0.25, 1.25, 2.0), 0)
        assert worker.batches[0].pieces[0].frames == 6


@pytest.mark.parametrize("seed", range(40))
async def test_leaving_at_any_moment_leaves_nothing(monkeypatch, seed):
    """Callers come, share, and go away at random; decoders and workers fail at random; at the end all is given back."""
    chance = random.Random(seed)

    def answers(_):
        return chance.choice([DONE, DONE, BatchFailed(why="chance")])

    decoders = FakeDecoders(SEEN, turns=chance.randint(0, 4))
    async with encoder(monkeypatch, answers=answers, decoders=decoders, store_bytes=1024) as (made, _):
        tasks = [asyncio.create_task(rows(made, item(chance.randrange(8)))) for _ in range(30)]
        tasks += [asyncio.create_task(made.prefetch(item(chance.randrange(8)))) for _ in range(5)]
        for task in chance.sample(tasks, 18):
            await turns(chance.randint(0, 4))
            task.cancel()
            made.check_integrity()
            decoders.failure = InvalidInput("chance") if chance.random() < 0.2 else None
        for each in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(each, BaseException) or isinstance(each, TwinlensError | asyncio.CancelledError)
        await turns(50)
        made.check_idle()


class StubbornDecoders(FakeDecoders):
    """A job gives its first frame, and ends when `go_on` is set, no sooner when it is cancelled."""

    def __init__(self) -> None:
        super().__init__(SEEN)
        self.go_on = asyncio.Event()

    async def decode(self, *_, on_frames, **__) -> None:
        on_frames(1)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            await self.go_on.wait()
            raise


async def test_memory_that_a_decode_process_may_write_to_is_kept_from_whoever_leaves(monkeypatch):
    """No worker can compute the item, so that its decoding is ended; then its caller leaves as well."""

    def no_worker(*_) -> None:
        raise Unavailable("no worker")

    decoders = StubbornDecoders()
    async with encoder(monkeypatch, decoders=decoders) as (made, _):
        monkeypatch.setattr(made.pipeline.dispatcher, "submit", no_worker)
        waiting = asyncio.create_task(rows(made, item()))
        await turns(30)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await turns(30)
        assert made.pipeline.media.staging.used
        decoders.go_on.set()
        await turns(30)
        assert not made.pipeline.media.staging.used


async def test_stopping_waits_for_what_nobody_wanted_any_more(monkeypatch):
    decoders = StubbornDecoders()
    async with encoder(monkeypatch, decoders=decoders) as (made, _):
        monkeypatch.setattr(made.pipeline.dispatcher, "_pump", lambda: None)  # no worker begins on it
        waiting = asyncio.create_task(rows(made, item()))
        await turns(30)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        stopping = asyncio.create_task(made.stop())
        await turns(30)
        assert not stopping.done()
        decoders.go_on.set()
        await stopping
        made.check_idle()


async def test_stopping_lets_go_of_rows_that_were_complete_before_their_decoding_had_ended(monkeypatch):
    decoders = StubbornDecoders()
    async with encoder(monkeypatch, decoders=decoders) as (made, worker):
        waiting = asyncio.create_task(rows(made, item()))
        await turns(30)
        assert (len(worker.batches), len(made.pipeline.store), waiting.done()) == (1, 1, False)
        stopping = asyncio.create_task(made.stop())
        await turns(30)
        decoders.go_on.set()
        await asyncio.gather(waiting, stopping, return_exceptions=True)
        made.check_idle()
