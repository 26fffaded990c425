"""Rows that land, over real gRPC: in order, shared by all who want them, in room that is waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from common.errors import Forbidden, Internal, InvalidInput, NotFound, Unavailable
from common.media.item import Key, Modality, Url
from common.rpc.calls import current
from llm_service.encoders.encoder_cache import CacheEntry
from llm_service.request import MediaItem, Request
from tests.unit.llm_service.scripted import (
    ROWS,
    RUN,
    Bench,
    Call,
    ScriptedEncoder,
    bench,
    breaks_in_the_middle,
    content,
    eventually,
    hangs_after_the_header,
    hangs_before_the_header,
    is_full,
    key_of,
    request,
    settled,
    well,
)
from twinlens import v1


async def test_rows_land_as_they_were_sent() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        sent = b.encoders[0].calls[0].request
        assert (sent.request_id, sent.cache_salt, sent.priority) == ("name", "salt", 3)
        assert list(sent.accepts) == [v1.TRANSPORT_INLINE]
        assert b.cache.counters.received == ROWS


@pytest.mark.parametrize("size", [256 << 10, (256 << 10) + 1])
async def test_much_content_is_copied_into_its_request_in_a_thread(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    async def to_thread(work: Any, *given: Any) -> Any:
        made = await asyncio.to_thread(work, *given)
        copied.append(len(made) if isinstance(made, bytes) else 0)
        return made

    monkeypatch.setattr("llm_service.encoders.replica.tasks.to_thread", to_thread)
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        assert await b.whole(bytes(size)) == content(bytes(size))
        assert b.encoders[0].calls[0].request.items[0].data == bytes(size)
        assert sum(made >= size for made in copied) == (size > 256 << 10)


async def test_items_of_a_request_are_opened_at_once_and_keep_their_order() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        entries = await b.land(b"one", b"two", b"one")
        assert [entry.header.key for entry in entries] == [key_of(data) for data in (b"one", b"two", b"one")]
        assert entries[0] is entries[2]
        for entry in entries:
            await settled(entry)
            b.cache.release(entry)


async def test_an_items_own_fault_is_not_tried_elsewhere_and_names_the_callers_field() -> None:
    async def refuses(call: Call) -> None:
        status = v1.Status(code=3, message="the picture is broken", reason="MEDIA_BROKEN", field="items[0].data")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder([refuses]), ScriptedEncoder([refuses])) as b:
        await b.usable(2)
        with pytest.raises(InvalidInput) as error:
            await b.land(b"good", b"picture")
        assert error.value.reason == "MEDIA_BROKEN"
        assert error.value.field in ("here[0].data", "here[1].data")
        assert sum(len(encoder.calls) for encoder in b.encoders) <= 2


async def test_an_item_that_fails_after_its_header_fails_for_all_who_share_it_and_is_not_kept() -> None:
    async def fails_late(call: Call) -> None:
        await call.header()
        status = v1.Status(code=13, message="the item could not be encoded", reason="ENCODE_FAILED")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder([fails_late, fails_late, well])) as b:
        await b.usable(1)
        entries = await b.land(b"picture", b"picture")
        for entry in entries:
            await settled(entry)
            assert isinstance(entry.error, Internal)
            b.cache.release(entry)
        assert b.cache.used_bytes == 0
        b.encoders[0].script = [well]
        assert await b.whole(b"picture") == content(b"picture")


async def test_who_leaves_before_the_header_ends_the_call() -> None:
    async with bench(ScriptedEncoder([hangs_before_the_header])) as b:
        await b.usable(1)
        landing = asyncio.create_task(b.land(b"picture"))
        await eventually(lambda: b.encoders[0].open == 1)
        landing.cancel()
        await eventually(lambda: b.encoders[0].open == 0)


async def test_the_last_who_wants_an_item_ends_the_call_and_not_the_first() -> None:
    async with bench(ScriptedEncoder([hangs_after_the_header, well])) as b:
        await b.usable(1)
        (first,), (second,) = await b.land(b"picture"), await b.land(b"picture")
        await eventually(lambda: b.encoders[0].open == 1)
        b.cache.release(first)
        await b.whole(b"another")  # whatever would have been said to the encoder has been said by now
        assert b.encoders[0].open == 1
        b.cache.release(second)
        await eventually(lambda: b.encoders[0].open == 0)
        assert not b.cache.knows(key_of(b"picture"))


async def test_a_requests_deadline_does_not_bound_what_others_may_share() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        (entry,) = await b.land(b"picture", deadline=asyncio.get_running_loop().time() + 8)
        await settled(entry)
        b.cache.release(entry)
        assert b.encoders[0].deadlines[0] > 10


async def test_rows_that_others_may_share_wait_for_room_longer_than_one_request_has_time() -> None:
    async with bench(ScriptedEncoder([well, is_full, well]), patience=600) as b:
        await b.usable(1)
        await b.whole(b"picture")  # its header is known from now on
        b.cache.flush()
        (first,), (second,) = await asyncio.gather(
            b.land(b"picture", deadline=asyncio.get_running_loop().time()), b.land(b"picture")
        )
        assert first is second
        await settled(second)
        assert second.error is None
        for entry in (first, second):
            b.cache.release(entry)


async def test_a_request_that_waits_for_room_keeps_no_stream_open_and_is_served_when_there_is_some() -> None:
    async with bench(ScriptedEncoder(), rows=ROWS) as b:
        await b.usable(1)
        (held,) = await b.land(b"first")
        waiting = asyncio.create_task(b.whole(b"second"))
        await eventually(lambda: len(b.encoders[0].calls) == 2)
        await settled(held)
        await eventually(lambda: b.encoders[0].open == 0)
        assert not waiting.done()
        b.cache.release(held)
        assert await waiting == content(b"second")


@dataclass
class Places:
    """An encoder with two places, in which both requests of a test have their first items before their second ones are
    let in. A place is kept until the rows of its item are read: they are more than gRPC keeps for a reader."""

    taken: int = 0
    firsts: set[bytes] = field(default_factory=set)

    async def __call__(self, call: Call) -> None:
        if self.taken == 2 or (len(self.firsts) < 2 and call.data.startswith(b"second")):
            status = v1.Status(code=8, message="full", reason="QUEUE_FULL", retry_after_ms=100)
            await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))
            return
        self.taken += 1
        if call.data.startswith(b"first"):
            self.firsts.add(call.data)
        try:
            await call.header()
            for _ in range(8):
                large = v1.EncodeResponse(progress=v1.EncodeProgress(stage="x" * (1 << 20)))
                await current().write(large, call.context)
            for first in range(0, ROWS, RUN):
                await call.rows(first)
            await call.done()
        finally:
            self.taken -= 1


@pytest.mark.parametrize("room", [True, False])
async def test_requests_whose_items_have_places_at_a_full_encoder_do_not_wait_for_each_other(room: bool) -> None:
    requests = [(b"first of one", b"second of one"), (b"first of two", b"second of two")]
    async with bench(ScriptedEncoder([Places()]), rows=(4 if room else 2) * ROWS, patience=30.0) as b:
        await b.usable(1)
        held = [] if room else await b.land(b"one that is read", b"another one")
        for entry in held:
            await settled(entry)

        async def whole(*files: bytes) -> list[bytes]:
            entries = await b.land(*files)
            try:
                for entry in entries:
                    await settled(entry)
                    assert entry.error is None
                return [bytes(b.cache.buffer.slice(entry.place)) for entry in entries]
            finally:
                for entry in entries:
                    b.cache.release(entry)

        await eventually(lambda: b.encoders[0].open == 0)
        asking = [asyncio.create_task(whole(*each)) for each in requests]
        if not room:
            await eventually(lambda: {call.data for call in b.encoders[0].calls} >= {*requests[0], *requests[1]})
            await eventually(lambda: b.encoders[0].open == 0)
            for entry in held:
                b.cache.release(entry)
        assert await asyncio.gather(*asking) == [[content(file) for file in each] for each in requests]
        assert b.cache.counters.hits == 0
        if room:
            sent = Counter(call.data for call in b.encoders[0].calls if call.data.startswith(b"first"))
            assert sent == {b"first of one": 1, b"first of two": 1}, "no item with a place is sent twice"


@pytest.mark.parametrize("room", [True, False])
async def test_items_keep_no_places_while_another_one_of_their_request_is_downloaded(room: bool) -> None:
    downloaded = asyncio.Event()

    async def downloads_one(call: Call) -> None:
        if call.data == b"slow":
            await downloaded.wait()
        elif call.data == b"quick" and not room and not downloaded.is_set():
            await hangs_after_the_header(call)  # it keeps its place until its caller leaves
        await well(call)

    async with bench(ScriptedEncoder([downloads_one]), rows=2 * ROWS, header_seconds=0) as b:
        await b.usable(1)
        held = [] if room else await b.land(b"one that is read", b"another one")
        for entry in held:
            await settled(entry)
        await eventually(lambda: b.encoders[0].open == 0)
        asking = asyncio.create_task(b.land(b"slow", b"quick"))
        sent = b.encoders[0].calls
        await eventually(lambda: {call.data for call in sent} >= {b"slow", b"quick"})
        await eventually(lambda: b.encoders[0].open == 1 and (not room or b.cache.holds(key_of(b"quick"))))
        assert not asking.done()
        downloaded.set()
        for entry in held:
            b.cache.release(entry)
        for entry, file in zip(await asking, [b"slow", b"quick"], strict=True):
            await settled(entry)
            assert bytes(b.cache.buffer.slice(entry.place)) == content(file)
            b.cache.release(entry)
        if room:
            assert [call.data for call in sent].count(b"quick") == 1, "what was read early is not sent again"


async def only_the_first_fits(call: Call) -> None:
    await (well if call.data == b"first" else is_full)(call)


async def test_rows_that_were_read_for_a_request_which_found_no_room_are_kept_for_the_next_one() -> None:
    async with bench(ScriptedEncoder([only_the_first_fits]), patience=600) as b:
        await b.usable(1)
        waiting = asyncio.create_task(b.land(b"first", b"second"))
        await eventually(lambda: b.cache.holds(key_of(b"first")))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await b.whole(b"first") == content(b"first")
        assert [call.data for call in b.encoders[0].calls].count(b"first") == 1


async def test_an_item_that_fails_while_another_one_of_its_request_waits_for_room_is_not_asked_for_again() -> None:
    refused = asyncio.Event()

    async def one_fails(call: Call) -> None:
        if call.data == b"first":
            await call.header()
            await refused.wait()
            status = v1.Status(code=13, message="no", reason="ROWS_NOT_FINITE", field="items[0]")
            await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))
        elif refused.is_set():
            await eventually(lambda: key_of(b"first") not in b.cache._entries)
            await well(call)
        else:
            await is_full(call)
            refused.set()

    async with bench(ScriptedEncoder([one_fails]), patience=600) as b:
        await b.usable(1)
        with pytest.raises(Internal) as error:
            await b.land(b"first", b"second")
        assert (error.value.reason, error.value.field) == ("ROWS_NOT_FINITE", "here[0]")
        assert sorted(call.data for call in b.encoders[0].calls) == [b"first", b"second", b"second"]


def by_key(data: bytes) -> Request:
    return replace(request(b""), media=(MediaItem(Modality.IMAGE, Key(key_of(data)), field="by key"),))


async def test_content_that_comes_while_rows_are_sought_by_key_is_used_where_they_are_not_there() -> None:
    sought, may_answer = asyncio.Event(), asyncio.Event()

    async def has_it_not(call: Call) -> None:
        sought.set()
        await may_answer.wait()
        status = v1.Status(code=5, message="no rows are kept under this key", reason="KEY_NOT_FOUND")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder([well, has_it_not, well])) as b:
        await b.usable(1)
        await b.whole(b"picture")  # its header is known from now on
        b.cache.flush()
        (first,) = await b.take(by_key(b"picture"))
        await sought.wait()
        (second,) = await b.land(b"picture")
        assert first is second
        may_answer.set()
        await settled(first)
        assert first.error is None
        assert bytes(b.cache.buffer.slice(first.place)) == content(b"picture")
        assert [call.request.items[0].WhichOneof("source") for call in b.encoders[0].calls] == ["data", "key", "data"]
        for entry in (first, second):
            b.cache.release(entry)


async def test_a_key_whose_rows_are_nowhere_is_not_found_and_nobody_s_content_is_kept_for_it() -> None:
    async def has_it_not(call: Call) -> None:
        status = v1.Status(code=5, message="no rows are kept under this key", reason="KEY_NOT_FOUND")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder([well, has_it_not])) as b:
        await b.usable(1)
        await b.whole(b"picture")
        b.cache.flush()
        (entry,) = await b.take(by_key(b"picture"))
        await settled(entry)
        assert isinstance(entry.error, NotFound)
        b.cache.release(entry)
        await eventually(lambda: not b.receiver._others)


def by_address(known_key: bytes = b"", url: str = "https://example.org/x") -> Request:
    item = MediaItem(Modality.IMAGE, Url(url, known_key), field="here[0]")
    return replace(request(b""), media=(item,))


async def gives_what_is_there(call: Call) -> None:
    """What an address gives, in the words of an encoder that has fetched it."""
    call.data = b"there"
    await well(call)


async def land(b: Bench, wanted: Request) -> CacheEntry:
    """The entry of the one item, its rows all here; released."""
    (entry,) = await b.take(wanted)
    await settled(entry)
    b.cache.release(entry)
    return entry


async def test_an_address_whose_key_is_known_asks_no_encoder_while_its_rows_are_here() -> None:
    async with bench(ScriptedEncoder([gives_what_is_there])) as b:
        await b.usable(1)
        entry = await land(b, by_address())
        again = await land(b, by_address(entry.header.key))
        assert again is entry
        assert (len(b.encoders[0].calls), b.receiver.counters.headers_known) == (1, 1)
        await land(b, by_address())
        assert len(b.encoders[0].calls) == 2, "without the key an address is always fetched"


@pytest.mark.parametrize("url", ["http://10.0.0.1/x", "https://other.test/x", "ftp://example.org/x", "file:///x"])
async def test_an_address_that_encoders_refuse_is_refused_though_the_rows_of_its_stated_key_are_here(url) -> None:
    async def refuses(call: Call) -> None:
        status = v1.Status(code=7, message="not from there", reason="FETCH_FORBIDDEN", field="items[0].url")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder([gives_what_is_there, refuses])) as b:
        await b.usable(1)
        key = (await land(b, by_address())).header.key
        await land(b, by_address(key))
        assert len(b.encoders[0].calls) == 1
        with pytest.raises(Forbidden) as refused:
            await land(b, by_address(key, url))
        assert (refused.value.reason, refused.value.field) == ("FETCH_FORBIDDEN", "here[0].url")


async def test_rows_that_came_otherwise_do_not_speak_for_an_address() -> None:
    async with bench(ScriptedEncoder([well, gives_what_is_there])) as b:
        await b.usable(1)
        assert await b.whole(b"there") == content(b"there")
        for calls in (2, 2):
            await land(b, by_address(key_of(b"there")))
            assert len(b.encoders[0].calls) == calls, "it is asked once whether the address may give it"


async def test_an_address_whose_rows_have_gone_is_asked_for_again_with_its_key() -> None:
    async with bench(ScriptedEncoder([gives_what_is_there])) as b:
        await b.usable(1)
        key = (await land(b, by_address())).header.key
        b.cache.flush()
        await land(b, by_address(key))
        first, second = (call.request.items[0] for call in b.encoders[0].calls)
        assert (first.known_key, second.known_key) == (b"", key)


async def test_an_address_that_gives_other_media_in_the_middle_is_told_as_that() -> None:
    async def gives_another(call: Call) -> None:
        call.data = b"another"
        await well(call)

    async def breaks(call: Call) -> None:
        call.data = b"there"
        await breaks_in_the_middle(call)

    async with bench(ScriptedEncoder([breaks]), ScriptedEncoder([breaks])) as b:
        await b.usable(2)
        (entry,) = await b.take(by_address())
        for encoder in b.encoders:  # whoever is asked next finds something else there
            encoder.script = [gives_another]
        await settled(entry)
        assert isinstance(entry.error, Unavailable)
        assert (entry.error.reason, entry.error.field) == ("MEDIA_CHANGED", "here[0]")
        assert all(replica.breaker.failures <= 1 for replica in b.pool.replicas), "no encoder is to blame"
        b.cache.release(entry)


async def test_what_came_by_address_is_sought_by_its_key_where_it_came_from() -> None:
    async with bench(*(ScriptedEncoder([gives_what_is_there]) for _ in range(4))) as b:
        await b.usable(4)
        key = (await land(b, by_address())).header.key
        b.cache.flush()
        by_key = replace(request(b""), media=(MediaItem(Modality.IMAGE, Key(key), field="here[0]"),))
        await land(b, by_key)
        assert sorted(len(encoder.calls) for encoder in b.encoders) == [0, 0, 0, 2]
