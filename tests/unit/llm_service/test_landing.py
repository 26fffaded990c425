"""The way to the encoders, over real gRPC: rows that land, streams that break or lie, and who is asked next."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from common.errors import DataLoss, Exhausted, Internal, InvalidInput, NotFound, TwinlensError, Unavailable
from common.grpc_calls import CallFrame
from common.identity import content_key
from common.wire import DType, RowLayout, crc32c
from llm_service.encoders.landing import Landing
from llm_service.encoders.peer import LinkSettings
from llm_service.encoders.pool import EncoderPool
from llm_service.request import Encoded, Key, MediaItem, Request, Sampling, TextPrompt
from llm_service.rows import RowEntry, RowStore
from tests.waiting import until
from twinlens import v1

DIGEST = "the digest of our model"
LAYOUT = RowLayout(levels=2, width=8, dtype=DType.FLOAT32)  # rows of 64 bytes
ROWS, RUN = 12, 4

Say = Callable[["Call"], Awaitable[None]]


def key_of(data: bytes, salt: str = "salt") -> bytes:
    return content_key(DIGEST, "image", {}, salt, [data])


def content(data: bytes, first: int = 0, count: int = ROWS) -> bytes:
    """The rows of an item, each row told apart from all others; every number in them is finite."""
    noise = b"".join(hashlib.sha512(data + b"%d" % row).digest() for row in range(first, first + count))
    return (np.frombuffer(noise, "<u4") & 0x3FFFFFFF).tobytes()


@dataclass
class Call:
    """One Encode call at a scripted encoder, and what can be said in it."""

    data: bytes
    request: v1.EncodeRequest
    context: Any

    async def header(self, **changes: Any) -> None:
        given = {
            "key": key_of(self.data, self.request.cache_salt),
            "modality": v1.MODALITY_IMAGE,
            "grid": v1.Grid(t=1, h=4, w=12),
            "tokens": ROWS,
            "width": 8,
            "levels": 2,
            "dtype": v1.DATA_TYPE_FLOAT32,
            **changes,
        }
        await self.context.write(v1.EncodeResponse(header=v1.EncodeHeader(**given)))

    async def rows(self, first: int, count: int = RUN, **changes: Any) -> None:
        data = content(self.data, first, count)
        given = {"first_row": first, "count": count, "data": data, "crc32c": crc32c(data), **changes}
        await self.context.write(v1.EncodeResponse(rows=v1.EncodeRows(**given)))

    async def done(self) -> None:
        await self.context.write(v1.EncodeResponse(done=v1.EncodeDone()))

    async def breaks(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        await self.context.abort(code, "host 10.0.0.1 in /srv/encoder fell over")


async def well(call: Call) -> None:
    await call.context.write(v1.EncodeResponse(progress=v1.EncodeProgress(stage="queue")))
    await call.header()
    start = call.request.first_rows[0] if call.request.first_rows else 0
    for first in range(start, ROWS, RUN):
        await call.rows(first)
    await call.done()


@dataclass
class ScriptedEncoder(v1.EncoderServiceServicer):
    """Says in each call what its script says; the last line of the script is repeated."""

    script: list[Say] = field(default_factory=lambda: [well])
    digest: str = DIGEST
    address: str = ""
    calls: list[Call] = field(default_factory=list)
    open: int = 0
    deadlines: list[float] = field(default_factory=list)

    async def GetInfo(self, request: Any, context: Any) -> v1.EncoderServiceGetInfoResponse:
        return v1.EncoderServiceGetInfoResponse(digest=self.digest)

    async def GetLoad(self, request: Any, context: Any) -> v1.EncoderServiceGetLoadResponse:
        return v1.EncoderServiceGetLoadResponse()

    async def Encode(self, request: v1.EncodeRequest, context: Any) -> None:
        call = Call(request.items[0].data, request, context)
        say = self.script[min(len(self.calls), len(self.script) - 1)]
        self.calls.append(call)
        self.deadlines.append(context.time_remaining())
        self.open += 1
        try:
            await say(call)
        finally:
            self.open -= 1


@dataclass
class Bench:
    """Scripted encoders, a store, and a landing between them."""

    encoders: list[ScriptedEncoder]
    store: RowStore
    pool: EncoderPool
    landing: Landing

    async def usable(self, count: int) -> None:
        await eventually(lambda: sum(peer.usable for peer in self.pool.peers) == count)

    async def land(self, *files: bytes, deadline: float | None = None) -> list[RowEntry]:
        return await self.landing.land(request(*files, deadline=deadline))

    async def whole(self, data: bytes) -> bytes:
        """The rows of an item, after its entry is complete; the entry is released."""
        (entry,) = await self.land(data)
        try:
            await settled(entry)
            if entry.error is not None:
                raise entry.error
            return bytes(self.store.buffer.slice(entry.place))
        finally:
            self.store.release(entry)

    def first_and_second(self, data: bytes) -> tuple[ScriptedEncoder, ScriptedEncoder]:
        """The encoder that is asked first for an item, and the other."""
        identity = key_of(data)
        ranked = sorted(self.encoders, key=lambda e: hashlib.sha256(identity + e.address.encode()).digest())
        return ranked[0], ranked[1]


async def eventually(holds: Callable[[], object]) -> None:
    await asyncio.to_thread(until, holds, "what the test waits for", 20)


async def settled(entry: RowEntry) -> None:
    await eventually(lambda: entry.error is not None or entry.complete)


def request(*files: bytes, deadline: float | None = None, salt: str = "salt") -> Request:
    media = tuple(MediaItem(n, "image", Encoded(data), field=f"here[{n}]") for n, data in enumerate(files))
    return Request("name", TextPrompt("x"), media, Sampling(max_tokens=1), salt=salt, priority=3, deadline=deadline)


@asynccontextmanager
async def bench(*encoders: ScriptedEncoder, rows: int = 64, silence: float = 5.0) -> AsyncIterator[Bench]:
    """Starts servers for the encoders; asserts at the end that no call and no place was left."""
    async with AsyncExitStack() as stack:
        for encoder in encoders:
            server = grpc.aio.server(interceptors=[CallFrame("")])
            v1.add_EncoderServiceServicer_to_server(_Driven(encoder), server)
            encoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        store = RowStore(rows * LAYOUT.row_bytes, LAYOUT)
        stack.callback(store.close)
        settings = LinkSettings(digest=DIGEST, layout=LAYOUT, timeout=30.0, silence=silence)
        pool = EncoderPool([encoder.address for encoder in encoders], settings)
        await pool.start()
        stack.push_async_callback(pool.stop)
        yield Bench(list(encoders), store, pool, Landing(pool, store, 1.0))
        await eventually(lambda: not any(encoder.open for encoder in encoders))
        assert all(peer.in_flight == 0 for peer in pool.peers)
        store.check_idle()


class _Driven(v1.EncoderServiceServicer):
    """A scripted encoder behind the frame, which drives generators; the script itself writes to the stream."""

    def __init__(self, script: ScriptedEncoder) -> None:
        self._script = script

    async def GetInfo(self, request: Any, context: Any) -> v1.EncoderServiceGetInfoResponse:
        return await self._script.GetInfo(request, context)

    async def GetLoad(self, request: Any, context: Any) -> v1.EncoderServiceGetLoadResponse:
        return await self._script.GetLoad(request, context)

    async def Encode(self, request: Any, context: Any) -> AsyncIterator[v1.EncodeResponse]:
        await self._script.Encode(request, context)
        if False:
            yield v1.EncodeResponse()


async def test_rows_land_as_they_were_sent() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        sent = b.encoders[0].calls[0].request
        assert (sent.request_id, sent.cache_salt, sent.priority) == ("name", "salt", 3)
        assert list(sent.accepts) == [v1.TRANSPORT_INLINE]
        assert b.store.counters.received == ROWS


async def test_items_of_a_request_are_opened_at_once_and_keep_their_order() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        entries = await b.land(b"one", b"two", b"one")
        assert [entry.header.key for entry in entries] == [key_of(data) for data in (b"one", b"two", b"one")]
        assert entries[0] is entries[2]
        for entry in entries:
            await settled(entry)
            b.store.release(entry)


async def breaks_at_once(call: Call) -> None:
    await call.breaks()


async def breaks_after_the_header(call: Call) -> None:
    await call.header()
    await call.breaks()


async def breaks_in_the_middle(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.breaks()


async def is_cut_off(call: Call) -> None:
    await call.header()
    await call.rows(0)


async def is_done_too_early(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.done()


async def damages_rows(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.rows(RUN, data=b"\0" * RUN * 64)


async def doubles_rows(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.rows(0)


async def loses_rows(call: Call) -> None:
    await call.header()
    await call.rows(RUN)


async def miscounts_rows(call: Call) -> None:
    await call.header()
    await call.rows(0, count=RUN, data=content(call.data, 0, 3), crc32c=crc32c(content(call.data, 0, 3)))


async def sends_what_is_no_number(call: Call) -> None:
    await call.header()
    data = np.array([float("nan")] * RUN * 16, "<f4").tobytes()
    await call.rows(0, data=data, crc32c=crc32c(data))


async def sends_too_many(call: Call) -> None:
    await call.header(tokens=RUN)
    await call.rows(0)
    await call.rows(RUN)


async def sends_a_header_of_another_width(call: Call) -> None:
    await call.header(width=16)


async def sends_a_header_of_another_type(call: Call) -> None:
    await call.header(dtype=v1.DATA_TYPE_BFLOAT16)


async def sends_a_senseless_header(call: Call) -> None:
    await call.header(key=b"short", grid=v1.Grid())


async def says_cancelled(call: Call) -> None:
    await call.header()
    await call.breaks(grpc.StatusCode.CANCELLED)


BROKEN: list[Say] = [
    breaks_at_once,
    breaks_after_the_header,
    breaks_in_the_middle,
    is_cut_off,
    is_done_too_early,
    damages_rows,
    doubles_rows,
    loses_rows,
    miscounts_rows,
    sends_what_is_no_number,
    sends_a_header_of_another_width,
    sends_a_header_of_another_type,
    sends_a_senseless_header,
    says_cancelled,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda say: say.__name__.replace("_", " "))
async def test_a_stream_that_breaks_or_lies_is_taken_up_on_another_encoder_from_the_first_missing_row(
    broken: Say,
) -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [broken]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)
        assert b.store.counters.received == ROWS, "a row landed twice"


@pytest.mark.parametrize("broken", BROKEN, ids=lambda say: say.__name__.replace("_", " "))
async def test_where_no_other_encoder_is_the_error_is_ours_and_says_nothing_of_the_host(broken: Say) -> None:
    async with bench(ScriptedEncoder([broken])) as b:
        await b.usable(1)
        with pytest.raises((Unavailable, DataLoss)) as error:
            await b.whole(b"picture")
        assert "10.0.0.1" not in error.value.message
        assert "/srv" not in error.value.message
        assert b.store.used_bytes == 0


async def test_more_rows_than_the_header_said_never_reach_the_arena() -> None:
    async with bench(ScriptedEncoder([sends_too_many])) as b:
        await b.usable(1)
        (entry,) = await b.land(b"picture")
        await settled(entry)
        assert entry.landed <= RUN
        b.store.release(entry)


async def test_a_stream_that_breaks_after_its_last_row_has_done_its_work() -> None:
    async def breaks_at_the_end(call: Call) -> None:
        await call.header()
        await call.rows(0, ROWS)
        await call.breaks()

    async with bench(ScriptedEncoder([breaks_at_the_end])) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        assert await b.whole(b"picture") == content(b"picture")


async def test_an_encoder_that_gives_another_key_is_not_believed() -> None:
    async def gives_another_key(call: Call) -> None:
        await call.header(key=key_of(b"another"))
        await call.rows(0, ROWS)

    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script, second.script = [breaks_in_the_middle], [gives_another_key]
        with pytest.raises((DataLoss, Unavailable)):
            await b.whole(b"picture")


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
            b.store.release(entry)
        assert b.store.used_bytes == 0
        b.encoders[0].script = [well]
        assert await b.whole(b"picture") == content(b"picture")


async def hangs_before_the_header(call: Call) -> None:
    await asyncio.Event().wait()


async def hangs_after_the_header(call: Call) -> None:
    await call.header()
    await asyncio.Event().wait()


async def test_who_leaves_before_the_header_ends_the_call() -> None:
    async with bench(ScriptedEncoder([hangs_before_the_header])) as b:
        await b.usable(1)
        landing = asyncio.create_task(b.land(b"picture"))
        await eventually(lambda: b.encoders[0].open == 1)
        landing.cancel()
        await eventually(lambda: b.encoders[0].open == 0)


async def test_the_last_who_wants_an_item_ends_the_call_and_not_the_first() -> None:
    async with bench(ScriptedEncoder([hangs_after_the_header])) as b:
        await b.usable(1)
        (first,), (second,) = await b.land(b"picture"), await b.land(b"picture")
        await eventually(lambda: b.encoders[0].open == 1)
        b.store.release(first)
        await asyncio.sleep(0)
        assert b.encoders[0].open == 1
        b.store.release(second)
        await eventually(lambda: b.encoders[0].open == 0)
        assert b.store.used_bytes == 0


async def test_a_requests_deadline_does_not_bound_what_others_may_share() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        (entry,) = await b.land(b"picture", deadline=asyncio.get_running_loop().time() + 0.5)
        await settled(entry)
        b.store.release(entry)
        assert b.encoders[0].deadlines[0] > 10


async def test_an_encoder_of_another_model_is_never_asked() -> None:
    async with bench(ScriptedEncoder(digest="another")) as b:
        await eventually(lambda: b.pool.peers)
        with pytest.raises(Unavailable) as error:
            await b.land(b"picture")
        assert error.value.reason == "NO_ENCODER"
        assert b.encoders[0].calls == []


async def test_a_request_waits_a_moment_for_an_encoder_that_is_about_to_be_there() -> None:
    async with bench(ScriptedEncoder()) as b:  # asked before the first answer to GetInfo has come
        assert await b.whole(b"picture") == content(b"picture")


async def test_repeats_go_where_they_went_and_different_items_are_spread() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(3))) as b:
        await b.usable(3)
        for _ in range(2):
            for number in range(40):
                await b.whole(b"picture %d" % number)
        seen = [{call.data for call in encoder.calls} for encoder in b.encoders]
        assert all(seen)
        assert sum(map(len, seen)) == 40, "one picture went to two encoders"


async def test_a_crowded_encoder_is_passed_over() -> None:
    scripts = [hangs_after_the_header]
    async with bench(ScriptedEncoder(scripts), ScriptedEncoder(scripts), rows=12 * ROWS) as b:
        await b.usable(2)
        first, second = b.encoders
        # Twelve pictures that are all the first encoder's: it is asked until eight calls are under way there.
        names = (b"picture %d" % number for number in itertools.count())
        its_own = itertools.islice((name for name in names if b.first_and_second(name)[0] is first), 12)
        held = [await b.land(name) for name in its_own]
        await eventually(lambda: (first.open, second.open) == (8, 4))
        for (entry,) in held:
            b.store.release(entry)


async def test_a_request_that_waits_for_room_keeps_no_stream_open_and_is_served_when_there_is_some() -> None:
    async with bench(ScriptedEncoder(), rows=ROWS) as b:
        await b.usable(1)
        (held,) = await b.land(b"first")
        waiting = asyncio.create_task(b.whole(b"second"))
        await eventually(lambda: len(b.encoders[0].calls) == 2)
        await settled(held)
        await eventually(lambda: b.encoders[0].open == 0)
        assert not waiting.done()
        b.store.release(held)
        assert await waiting == content(b"second")


async def is_full(call: Call) -> None:
    status = v1.Status(code=8, message="full", reason="QUEUE_FULL", retry_after_ms=200)
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


async def test_where_one_encoder_is_full_the_other_is_asked_at_once() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [is_full]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)
        assert b.landing.counters.retries == 0, "being sent away costs no retry"


async def test_where_all_encoders_are_full_an_item_waits_for_room() -> None:
    async with bench(ScriptedEncoder([is_full, is_full, well])) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        assert len(b.encoders[0].calls) == 3


async def test_where_all_stay_full_the_caller_is_told_so_with_a_hint() -> None:
    async with bench(ScriptedEncoder([is_full]), ScriptedEncoder([is_full])) as b:
        await b.usable(2)
        with pytest.raises(Exhausted) as error:
            await b.land(b"picture")
        assert error.value.reason == "QUEUE_FULL"
        assert error.value.retry_after


async def test_a_deadline_ends_the_wait_for_room() -> None:
    async with bench(ScriptedEncoder([is_full])) as b:
        await b.usable(1)
        with pytest.raises(Exhausted):
            await b.land(b"picture", deadline=asyncio.get_running_loop().time())
        assert len(b.encoders[0].calls) == 1


async def test_an_encoder_that_falls_silent_is_left_for_another() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), silence=0.3) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [hangs_after_the_header]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)


async def test_an_encoder_that_says_that_it_is_busy_is_waited_for() -> None:
    async def is_busy(call: Call) -> None:
        await call.header()
        for _ in range(10):
            await call.context.write(v1.EncodeResponse(progress=v1.EncodeProgress(stage="queue")))
            await asyncio.sleep(0.1)
        await call.rows(0, ROWS)
        await call.done()

    async with bench(ScriptedEncoder([is_busy]), silence=0.5) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        assert len(b.encoders[0].calls) == 1


async def test_a_key_is_sought_at_every_encoder() -> None:
    async def has_it_not(call: Call) -> None:
        status = v1.Status(code=5, message="no such key", reason="KEY_NOT_FOUND", field="items[0].key")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async def has_it(call: Call) -> None:
        await call.header(key=call.request.items[0].key)
        await call.rows(0, ROWS)
        await call.done()

    by_key = replace(request(b""), media=(MediaItem(0, "image", Key(b"k" * 32), field="here[0]"),))
    async with bench(*(ScriptedEncoder([has_it_not]) for _ in range(3))) as b:
        await b.usable(3)
        with pytest.raises(NotFound):
            await b.landing.land(by_key)
        assert [len(encoder.calls) for encoder in b.encoders] == [1, 1, 1]
        b.encoders[1].script = [has_it]
        (entry,) = await b.landing.land(by_key)
        await settled(entry)
        assert entry.error is None
        b.store.release(entry)


async def test_a_header_that_was_damaged_is_not_believed() -> None:
    async def with_a_wrong_sum(call: Call) -> None:
        await call.header(crc32c=1)

    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [with_a_wrong_sum]
        assert await b.whole(b"picture") == content(b"picture")
        assert len(second.calls) == 1


async def test_when_everything_fails_retries_do_not_make_it_worse() -> None:
    async with bench(ScriptedEncoder([damages_rows]), ScriptedEncoder([damages_rows]), rows=150 * ROWS) as b:
        await b.usable(2)
        ends = await asyncio.gather(*(b.whole(b"picture %d" % number) for number in range(150)), return_exceptions=True)
        assert all(isinstance(end, DataLoss | Unavailable) for end in ends)
        assert b.landing.counters.attempts <= 1.2 * 150 + 64


async def test_errors_that_callers_see_are_of_our_tree() -> None:
    async def fails_strangely(call: Call) -> None:
        raise RuntimeError("inside")

    async with bench(ScriptedEncoder([fails_strangely])) as b:
        await b.usable(1)
        with pytest.raises(TwinlensError) as error:
            await b.whole(b"picture")
        assert isinstance(error.value, Internal)


@pytest.mark.parametrize("bad", ["no-such-name.invalid", "label" * 20 + ".invalid", "a..b"])
async def test_a_name_is_looked_up_and_one_that_cannot_be_hurts_no_other(bad: str) -> None:
    async with bench(ScriptedEncoder()) as b:
        port = b.encoders[0].address.rpartition(":")[2]
        addresses = (f"dns:///{bad}:7001", f"dns:///localhost:{port}")
        pool = EncoderPool(addresses, LinkSettings(digest=DIGEST, layout=LAYOUT))
        await pool.start()
        await eventually(lambda: any(peer.usable for peer in pool.peers))
        await pool.stop()
