"""Streams that break, fall silent or lie, over real gRPC: caught, and taken up elsewhere from the first missing row."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import grpc
import numpy as np
import pytest

from common.errors import DataLoss, Internal, TwinlensError, Unavailable
from common.rows.wire import crc32c
from common.rpc.calls import current
from llm_service.encoders.breaker import RetryBudget
from llm_service.encoders.transports.shared_memory import SharedMemory
from tests.unit.llm_service.scripted import (
    LAYOUT,
    ROWS,
    RUN,
    Call,
    Say,
    ScriptedEncoder,
    bench,
    breaks_in_the_middle,
    content,
    damages_rows,
    eventually,
    hangs_after_the_header,
    key_of,
    settled,
    well,
)
from twinlens import v1


async def breaks_at_once(call: Call) -> None:
    await call.breaks()


async def breaks_after_the_header(call: Call) -> None:
    await call.header()
    await call.breaks()


async def is_cut_off(call: Call) -> None:
    await call.header()
    await call.rows(0)


async def is_done_too_early(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.done()


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
    await call.header(tokens=RUN, grid=v1.Grid(t=1, h=2, w=2 * RUN))
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
        assert b.cache.counters.received == ROWS, "a row landed twice"


@pytest.mark.parametrize("broken", BROKEN, ids=lambda say: say.__name__.replace("_", " "))
async def test_where_no_other_encoder_is_the_error_is_ours_and_says_nothing_of_the_host(broken: Say) -> None:
    async with bench(ScriptedEncoder([broken])) as b:
        await b.usable(1)
        with pytest.raises((Unavailable, DataLoss)) as error:
            await b.whole(b"picture")
        assert "10.0.0.1" not in error.value.message
        assert "/srv" not in error.value.message
        assert b.cache.used_bytes == 0


async def test_more_rows_than_the_header_said_never_reach_the_arena() -> None:
    async with bench(ScriptedEncoder([sends_too_many])) as b:
        await b.usable(1)
        (entry,) = await b.land(b"picture")
        await settled(entry)
        assert entry.landed <= RUN
        b.cache.release(entry)


async def test_a_stream_that_breaks_after_its_last_row_has_done_its_work() -> None:
    async def breaks_at_the_end(call: Call) -> None:
        await call.header()
        await call.rows(0, ROWS)
        await call.breaks()

    async with bench(ScriptedEncoder([breaks_at_the_end])) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        assert await b.whole(b"picture") == content(b"picture")


@pytest.mark.parametrize("kept_until_then", [True, False])
async def test_how_a_stream_ends_is_of_no_account_once_all_rows_are_here(kept_until_then: bool) -> None:
    """Not even where the end is an error that no other stream could mend, and the rows are cache by then."""
    may_break = asyncio.Event()

    async def fails_at_the_end(call: Call) -> None:
        await call.header()
        await call.rows(0, ROWS)
        await may_break.wait()
        status = v1.Status(code=13, message="the item could not be encoded", reason="ENCODE_FAILED")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder([fails_at_the_end])) as b:
        await b.usable(1)
        (entry,) = await b.land(b"picture")
        await settled(entry)
        if not kept_until_then:
            b.cache.release(entry)
        may_break.set()
        assert entry.filler is not None
        await asyncio.wait({entry.filler})
        assert entry.error is None
        if kept_until_then:
            b.cache.release(entry)
        assert b.cache.flush() == ROWS * LAYOUT.row_bytes


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


async def test_an_encoder_that_falls_silent_is_left_for_another() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), silence=1.0) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [hangs_after_the_header]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)


async def test_an_encoder_whose_connection_takes_no_more_streams_is_neither_silent_nor_gone() -> None:
    go_on = asyncio.Event()

    async def is_busy(call: Call) -> None:
        while not go_on.is_set():
            await call.context.write(v1.EncodeResponse(progress=v1.EncodeProgress(stage="queue")))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(go_on.wait(), 0.05)
        await well(call)

    async with bench(ScriptedEncoder([is_busy]), streams=2, silence=0.5, patience=600, check_seconds=0.02) as b:
        await b.usable(1)
        (encoder,), (replica,) = b.encoders, b.pool.replicas
        names = [b"picture %d" % number for number in range(4)]
        landing = [asyncio.create_task(b.whole(name)) for name in names]
        await eventually(lambda: (encoder.open, replica.in_flight) == (2, 4))
        asked = encoder.questions
        await eventually(lambda: encoder.questions > asked + 50)  # a second at least: twice the time for a silence
        go_on.set()
        assert await asyncio.gather(*landing) == [content(name) for name in names]
        assert len(encoder.calls) == 4
        assert (replica.usable, replica.breaker.failures, b.receiver.counters.retries) == (True, 0, 0)


async def says_that_we_are_late(call: Call) -> None:
    status = v1.Status(code=14, message="late", reason="LEASE_EXPIRED", retry_after_ms=1000)
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


async def test_rows_for_which_this_service_comes_too_late_are_asked_for_again_where_they_are() -> None:
    """Whoever held them is not charged, by breaker, budget or suspicion."""

    async def gives_up_on_us(call: Call) -> None:
        await call.header()
        await call.rows(0)
        await says_that_we_are_late(call)

    budget = RetryBudget(1.0)
    async with bench(ScriptedEncoder(), ScriptedEncoder(), budget=budget, check_seconds=600) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [gives_up_on_us, well]
        assert await b.whole(b"picture") == content(b"picture")
        assert [list(call.request.first_rows) for call in first.calls] == [[], [RUN]]
        assert second.calls == []
        assert all(replica.usable and not replica.breaker.failures for replica in b.pool.replicas)
        assert (budget.spend(), budget.spend()) == (True, False)


async def test_who_is_too_late_for_rows_every_time_is_told_so() -> None:
    async def never_waits(call: Call) -> None:
        await call.header()
        await says_that_we_are_late(call)

    async with bench(ScriptedEncoder([never_waits]), check_seconds=600) as b:
        await b.usable(1)
        with pytest.raises(Unavailable) as error:
            await b.whole(b"picture")
        assert error.value.reason == "LEASE_EXPIRED"
        assert len(b.encoders[0].calls) == 3
        assert b.pool.replicas[0].usable


async def test_rows_whose_leases_ended_twice_come_in_the_stream_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def is_late(call: Call) -> None:
        await call.header()
        await says_that_we_are_late(call)

    monkeypatch.setattr(SharedMemory, "usable", True)
    async with bench(ScriptedEncoder([is_late, is_late, well]), check_seconds=600) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        leased, inline = v1.TRANSPORT_SHARED_MEMORY, v1.TRANSPORT_INLINE
        accepted = [list(call.request.accepts) for call in b.encoders[0].calls]
        assert accepted == [[leased, inline], [leased, inline], [inline]]


async def test_an_encoder_that_ends_a_stream_which_nobody_reads_is_not_charged() -> None:
    """The rows of a picture wait for the header of another one for longer than its encoder does."""
    async with bench(ScriptedEncoder(), rows=2 * ROWS, check_seconds=600) as b:
        await b.usable(1)
        (encoder,), (replica,) = b.encoders, b.pool.replicas

        async def gives_up_on_us(call: Call) -> None:
            current().limit_stalls(0.2)
            await call.header()
            large = v1.EncodeResponse(progress=v1.EncodeProgress(stage="x" * (1 << 20)))
            while True:  # more than gRPC keeps for its reader
                await current().write(large, call.context)

        async def by_turns(call: Call) -> None:
            if call.data == b"early" and sum(each.data == b"early" for each in encoder.calls) == 1:
                await gives_up_on_us(call)
            if call.data == b"late":
                await eventually(lambda: (len(encoder.calls), encoder.open) == (2, 1))
            await well(call)

        encoder.script = [by_turns]
        entries = await b.land(b"early", b"late")
        for entry in entries:
            await settled(entry)
            assert entry.error is None
            b.cache.release(entry)
        assert [call.data for call in encoder.calls].count(b"early") == 2
        assert (replica.usable, replica.breaker.failures) == (True, 0)


@pytest.mark.parametrize("header_came", [True, False])
async def test_an_item_that_takes_too_long_is_no_deadline_of_its_caller_and_takes_two_encoders_at_most(
    header_came: bool,
) -> None:
    async def takes_all_its_time(call: Call) -> None:
        if header_came:
            await call.header()
        await call.breaks(grpc.StatusCode.DEADLINE_EXCEEDED)

    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = second.script = [takes_all_its_time]
        with pytest.raises(Unavailable) as error:
            await b.whole(b"picture")
        assert (error.value.reason, error.value.field) == ("ENCODER_SLOW", "here[0]")
        assert (len(first.calls), len(second.calls)) == (1, 1)


async def test_an_encoder_that_takes_too_long_time_after_time_is_left_alone_until_a_stream_ends_well() -> None:
    async def takes_all_its_time(call: Call) -> None:
        await call.breaks(grpc.StatusCode.DEADLINE_EXCEEDED)

    async with bench(ScriptedEncoder([*[takes_all_its_time] * 2, well, *[takes_all_its_time] * 3])) as b:
        await b.usable(1)
        (replica,) = b.pool.replicas
        failures = []
        for slow in (True, True, False, True, True, True):
            with pytest.raises(Unavailable) if slow else contextlib.nullcontext():
                await b.whole(b"picture %d" % len(failures))
            failures.append(replica.breaker.failures)
        assert failures == [1, 2, 0, 1, 2, 3]


async def test_a_header_that_was_damaged_is_not_believed() -> None:
    async def with_a_wrong_sum(call: Call) -> None:
        await call.header(crc32c=1)

    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [with_a_wrong_sum]
        assert await b.whole(b"picture") == content(b"picture")
        assert len(second.calls) == 1


async def breaks_in_the_last_run(call: Call) -> None:
    await call.header()
    for first in range(0, ROWS - RUN, RUN):
        await call.rows(first)
    await call.breaks()


WAYS: list[Say] = [
    breaks_at_once,
    breaks_after_the_header,
    breaks_in_the_last_run,
    damages_rows,
    sends_a_header_of_another_width,
    hangs_after_the_header,
]


@pytest.mark.parametrize("encoders", [1, 4])
@pytest.mark.parametrize("fails", WAYS, ids=lambda say: say.__name__.replace("_", " "))
async def test_when_everything_fails_retries_do_not_make_it_worse(fails: Say, encoders: int) -> None:
    count, scripts = 50, (ScriptedEncoder([fails]) for _ in range(encoders))
    async with bench(*scripts, rows=count * ROWS, silence=0.5, budget=RetryBudget(4.0)) as b:
        await b.usable(encoders)
        items = (b.whole(b"picture %d" % number) for number in range(count))
        ends = await asyncio.gather(*items, return_exceptions=True)
        assert all(isinstance(end, DataLoss | Unavailable) for end in ends)
        assert b.receiver.counters.attempts <= 1.2 * count + 4


async def test_all_items_of_an_encoder_that_ends_go_to_another_one() -> None:
    """However many they are: the budget is for encoders that fail again and again."""
    async with bench(ScriptedEncoder(), ScriptedEncoder(), rows=12 * ROWS, budget=RetryBudget(2.0)) as b:
        await b.usable(2)
        dying = b.encoders[0]
        names = (f"picture {number}".encode() for number in itertools.count())
        its_own = [*itertools.islice((name for name in names if b.first_and_second(name)[0] is dying), 6)]
        dying.script = [dying.dies(len(its_own))]
        assert await asyncio.gather(*map(b.whole, its_own)) == [*map(content, its_own)]


async def test_errors_that_callers_see_are_of_our_tree() -> None:
    async def fails_strangely(call: Call) -> None:
        raise RuntimeError("inside")

    async with bench(ScriptedEncoder([fails_strangely])) as b:
        await b.usable(1)
        with pytest.raises(TwinlensError) as error:
            await b.whole(b"picture")
        assert isinstance(error.value, Internal)


async def test_an_item_over_which_two_encoders_have_died_kills_no_third_one() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(4))) as b:
        await b.usable(4)
        for encoder in b.encoders:
            encoder.script = [encoder.dies()]
        with pytest.raises(Internal) as error:
            await b.whole(b"poison")
        assert (error.value.reason, error.value.field) == ("POISON_ITEM", "here[0]")
        await b.usable(2)
        asked = sum(len(encoder.calls) for encoder in b.encoders)
        with pytest.raises(Internal):
            await b.whole(b"poison")
        assert sum(len(encoder.calls) for encoder in b.encoders) == asked == 2
        for encoder in b.encoders:
            encoder.script = [well]
        assert await b.whole(b"picture") == content(b"picture")


async def test_many_who_want_the_same_poison_kill_no_third_encoder_either() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(3))) as b:
        await b.usable(3)
        first, _ = b.first_and_second(b"poison")
        for encoder in b.encoders:  # after their headers the callers share one stream
            encoder.script = [encoder.dies(8 if encoder is first else 1)]
        ends = await asyncio.gather(*(b.whole(b"poison") for _ in range(8)), return_exceptions=True)
        assert {type(end) for end in ends} == {Internal}
        assert sum(bool(encoder.calls) for encoder in b.encoders) == 2
        assert b.receiver.counters.retries <= 8
