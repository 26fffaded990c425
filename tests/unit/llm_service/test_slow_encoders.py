"""Encoders that live, say so, and give no row, over real gRPC: another one is asked as well, and the first that does it
is believed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
import pytest

from common.errors import Unavailable
from llm_service.encoders.breaker import RetryBudget
from llm_service.encoders.replica import Replica
from tests.unit.llm_service.scripted import (
    LAYOUT,
    ROWS,
    RUN,
    Bench,
    Call,
    Say,
    ScriptedEncoder,
    bench,
    content,
    eventually,
    is_full,
    request,
    settled,
    well,
)
from twinlens import v1

HEDGE = 0.3
"""Seconds."""


async def is_alive(call: Call, until: Callable[[], object] = lambda: False, stage: str = "vit") -> None:
    """Says so again and again, and nothing else."""
    while not until():
        await call.context.write(v1.EncodeResponse(progress=v1.EncodeProgress(stage=stage)))
        await asyncio.sleep(HEDGE / 10)


async def is_alive_after_the_header(call: Call) -> None:
    await call.header()
    await is_alive(call)


async def is_alive_after_first_rows(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await is_alive(call)


async def breaks_after_the_header(call: Call) -> None:
    await call.header()
    await call.breaks()


def after(times: float, stage: str, then: Say = well) -> Say:
    """An encoder that takes so many times as long as items wait, which it says to spend in a stage."""

    async def say(call: Call) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await is_alive(call, lambda: loop.time() > began + times * HEDGE, stage)
        await then(call)

    return say


def brings_rows_after(times: float, stage: str) -> Say:
    """An encoder that takes so many times as long as items wait between its first rows and the next ones."""

    async def say(call: Call) -> None:
        await call.header()
        await call.rows(0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await is_alive(call, lambda: loop.time() > began + times * HEDGE, stage)
        for first in range(RUN, ROWS, RUN):
            await call.rows(first)
        await call.done()

    return say


def replica_of(b: Bench, encoder: ScriptedEncoder) -> Replica:
    (replica,) = (each for each in b.pool.replicas if each.address == encoder.address)
    return replica


def first_asked_of(b: Bench, encoder: ScriptedEncoder) -> list[bytes]:
    """Pictures that this encoder is the first to be asked for."""
    names = (b"picture %d" % number for number in itertools.count())
    return [*itertools.islice((name for name in names if b.first_and_second(name)[0] is encoder), 8)]


@pytest.mark.parametrize("hangs", [is_alive, is_alive_after_the_header])
async def test_an_item_that_gets_no_row_is_asked_for_at_another_encoder_as_well(hangs: Say) -> None:
    budget = RetryBudget(1.0)
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE, budget=budget) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [hangs]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)
        assert [call.request.attempt for call in (*first.calls, *second.calls)] == [0, 1]
        assert (b.receiver.counters.attempts, b.receiver.counters.retries) == (2, 1)
        assert not budget.spend(), "that was a retry"
        assert b.cache.counters.received == ROWS
        assert replica_of(b, first).pace.slow
        assert (replica_of(b, first).usable, replica_of(b, first).breaker.failures) == (True, 0)
        await eventually(lambda: not first.open)


async def test_an_item_whose_rows_stop_coming_is_continued_at_another_encoder() -> None:
    budget = RetryBudget(1.0)
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE, budget=budget) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [is_alive_after_first_rows]
        assert await b.whole(b"picture") == content(b"picture")
        assert [list(call.request.first_rows) for call in (*first.calls, *second.calls)] == [[], [RUN]]
        assert b.cache.counters.received == ROWS, "a row landed twice"
        assert not budget.spend(), "that was a retry"
        assert replica_of(b, first).pace.slow
        assert (replica_of(b, first).usable, replica_of(b, first).breaker.failures) == (True, 0)
        await eventually(lambda: not first.open)


async def test_rows_that_come_as_slowly_as_the_first_ones_are_waited_for() -> None:
    """What an encoder computes slowly, but steadily, need not begin anew at another one."""
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=1.0) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")

        async def is_slow(call: Call) -> None:
            waited = replica_of(b, first).expected
            await call.header()
            await is_alive(call, lambda: waited(12) > 0.5)
            await call.rows(0)
            await is_alive(call, lambda: waited(12) > 1.2)
            await call.rows(RUN, ROWS - RUN)
            await call.done()

        first.script = [is_slow]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 0)


async def test_rows_that_stop_coming_twice_are_waited_for() -> None:
    """It may be the item that devices hang over."""
    async with bench(*(ScriptedEncoder() for _ in range(3)), hedge=HEDGE) as b:
        await b.usable(3)
        first, second, third = b.by_rank(b"picture")

        async def goes_on_late(call: Call) -> None:
            await call.header()
            await call.rows(RUN)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await is_alive(call, lambda: loop.time() > began + 3 * HEDGE)
            await call.rows(2 * RUN)
            await call.done()

        first.script, second.script = [is_alive_after_first_rows], [goes_on_late]
        assert await b.whole(b"picture") == content(b"picture")
        assert [len(each.calls) for each in (first, second, third)] == [1, 1, 0]


async def test_with_one_encoder_later_rows_are_waited_for() -> None:
    async with bench(ScriptedEncoder([brings_rows_after(3, "vit")]), hedge=HEDGE) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        assert b.receiver.counters.attempts == 1


@pytest.mark.parametrize("stage", ["fetch", "shared", "room"])
async def test_time_in_which_an_encoder_waits_for_others_before_later_rows_is_not_its_own(stage: str) -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [brings_rows_after(3, stage)]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 0)


async def test_rows_on_their_way_for_long_are_waited_for() -> None:
    """A slow network: the encoder says nothing while it sends."""

    async def sends_slowly(call: Call) -> None:
        await call.header()
        for first in range(0, ROWS, RUN):
            await call.rows(first)
            await asyncio.sleep(2 * HEDGE)
        await call.done()

    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [sends_slowly]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 0)
        assert not replica_of(b, first).pace.slow


async def test_who_is_first_to_give_the_header_may_hang_over_the_rows() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(3)), hedge=HEDGE) as b:
        await b.usable(3)
        first, second, third = b.by_rank(b"picture")
        first.script, second.script = [is_alive], [is_alive_after_the_header]
        assert await b.whole(b"picture") == content(b"picture")
        assert [len(each.calls) for each in (first, second, third)] == [1, 1, 1]
        assert b.receiver.counters.retries == 2
        assert [replica_of(b, each).pace.slow for each in (first, second, third)] == [True, True, False]
        await eventually(lambda: not (first.open or second.open))


async def test_who_was_late_with_the_header_may_be_asked_for_the_rows() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.by_rank(b"picture")

        async def hangs_after_a_late_header(call: Call) -> None:
            await is_alive(call, lambda: second.calls)
            await is_alive_after_the_header(call)

        first.script, second.script = [hangs_after_a_late_header], [is_alive, well]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 2)


async def test_no_third_encoder_computes_an_item() -> None:
    """That may be what they hang over."""
    async with bench(*(ScriptedEncoder() for _ in range(3)), hedge=HEDGE) as b:
        await b.usable(3)
        first, second, third = b.by_rank(b"picture")

        async def is_late(call: Call) -> None:
            await call.header()
            await is_alive(call, lambda: replica_of(b, second).expected(12) > 3 * HEDGE)
            await call.rows(0, ROWS)
            await call.done()

        first.script, second.script = [is_late], [is_alive_after_the_header]
        assert await b.whole(b"picture") == content(b"picture")
        assert [len(each.calls) for each in (first, second, third)] == [1, 1, 0]


async def test_all_items_that_wait_at_a_slow_encoder_go_to_others_by_their_rank() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(3)), rows=8 * ROWS, hedge=HEDGE) as b:
        await b.usable(3)
        slow, *others = b.encoders
        slow.script = [is_alive_after_the_header]
        names = first_asked_of(b, slow)
        assert await asyncio.gather(*map(b.whole, names)) == [*map(content, names)]
        assert len(slow.calls) == 8
        assert sum(len(other.calls) for other in others) == 8, "each is asked for elsewhere once"
        assert all(other.calls for other in others)


async def test_a_slow_encoder_is_passed_over_until_a_try_succeeds() -> None:
    go_on = asyncio.Event()

    async def waits_for_others_in_the_middle(call: Call) -> None:
        await call.header()
        await call.rows(0)
        await is_alive(call, go_on.is_set, "fetch")
        await call.rows(4, ROWS - 4)
        await call.done()

    async with bench(ScriptedEncoder(), ScriptedEncoder(), rows=8 * ROWS, hedge=HEDGE) as b:
        await b.usable(2)
        slow, other = b.encoders
        slow.script = [waits_for_others_in_the_middle, is_alive, well]
        names = first_asked_of(b, slow)
        (begun,) = await b.land(names[0])
        assert await b.whole(names[1]) == content(names[1])
        for name in names[2:]:
            assert await b.whole(name) == content(name)
        assert (len(slow.calls), len(other.calls)) == (2, 7), (
            "what waits for others stays, and nothing is tried beside it"
        )
        go_on.set()
        await settled(begun)
        assert begun.error is None
        b.cache.release(begun)
        replica = replica_of(b, slow)
        while replica.pace.slow:
            await eventually(lambda: not replica.passed_over)
            b.cache.flush()
            assert await b.whole(names[0]) == content(names[0])
        b.cache.flush()
        asked = len(other.calls)
        for name in names:
            assert await b.whole(name) == content(name)
        assert len(other.calls) == asked, "it has its own pictures again"


async def test_with_one_encoder_it_is_waited_for() -> None:
    async with bench(ScriptedEncoder([after(3, "vit")]), hedge=HEDGE) as b:
        await b.usable(1)
        assert await b.whole(b"picture") == content(b"picture")
        assert (b.receiver.counters.attempts, b.pool.replicas[0].pace.slow) == (1, False)


@pytest.mark.parametrize("stage", ["fetch", "shared", "room"])
async def test_time_in_which_an_encoder_waits_for_others_is_not_its_own(stage: str) -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [after(3, stage)]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 0)


async def test_at_a_slow_encoder_who_waits_for_room_goes_as_well() -> None:
    async def waits_for_room(call: Call) -> None:
        await call.header()
        await is_alive(call, stage="room")

    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        slow, other = b.encoders
        slow.script = [waits_for_room, is_alive]
        names = first_asked_of(b, slow)[:2]
        assert await asyncio.gather(*map(b.whole, names)) == [*map(content, names)]
        assert (len(slow.calls), len(other.calls)) == (2, 2)


async def test_where_others_are_as_slow_nothing_is_asked_twice() -> None:
    """Encoders that have much to do."""
    async with bench(*(ScriptedEncoder([after(4, "queue")]) for _ in range(2)), rows=8 * ROWS, hedge=HEDGE) as b:
        await b.usable(2)
        names = [name for encoder in b.encoders for name in first_asked_of(b, encoder)[:2]]
        assert await asyncio.gather(*map(b.whole, names)) == [*map(content, names)]
        assert (b.receiver.counters.attempts, b.receiver.counters.retries) == (4, 0)
        assert not any(replica.pace.slow for replica in b.pool.replicas)


async def test_where_no_retry_is_left_an_item_waits_on() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE, budget=RetryBudget(0.0)) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [after(3, "vit")]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 0)


async def test_the_first_encoder_is_believed_where_it_is_done_first_after_all() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder([is_alive_after_the_header]), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")

        async def is_late(call: Call) -> None:
            await call.header()
            await is_alive(call, lambda: second.calls)
            await call.rows(0, ROWS)
            await call.done()

        first.script, second.script = [is_late], [is_alive_after_the_header]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)
        await eventually(lambda: not second.open)
        assert replica_of(b, first).pace.slow
        assert all(replica.usable for replica in b.pool.replicas)


@pytest.mark.parametrize("fails", [breaks_after_the_header, is_full])
async def test_where_the_other_encoder_fails_the_first_is_waited_for(fails: Say) -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")

        async def is_late(call: Call) -> None:
            await call.header()
            await is_alive(call, lambda: second.calls and not second.open)
            await call.rows(0, ROWS)
            await call.done()

        first.script, second.script = [is_late], [fails]
        assert await b.whole(b"picture") == content(b"picture")
        assert len(first.calls) == 1
        assert len(second.calls) == 1 or fails is is_full, "that one may be asked again"
        assert replica_of(b, second).breaker.failures == (fails is breaks_after_the_header)
        assert replica_of(b, first).breaker.failures == 0


async def test_an_encoder_that_was_full_is_asked_when_it_has_room() -> None:
    budget = RetryBudget(1.0)
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE, budget=budget) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script, second.script = [is_alive_after_the_header], [is_full, well]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 2)
        assert b.receiver.counters.retries == 1, "being sent away is none"
        assert not budget.spend()


async def test_where_the_slow_encoder_fails_the_other_goes_on() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")

        async def breaks_late(call: Call) -> None:
            await call.header()
            await is_alive(call, lambda: second.calls)
            await call.breaks()

        async def is_last(call: Call) -> None:
            await call.header()
            await is_alive(call, lambda: not first.open)
            await call.rows(0, ROWS)
            await call.done()

        first.script, second.script = [breaks_late], [is_last]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)
        assert replica_of(b, first).breaker.failures == 1


async def test_an_item_that_leaves_closes_both_streams() -> None:
    async with bench(*(ScriptedEncoder([is_alive_after_the_header]) for _ in range(2)), hedge=HEDGE) as b:
        await b.usable(2)
        (entry,) = await b.land(b"picture")
        await eventually(lambda: all(encoder.open for encoder in b.encoders))
        b.cache.release(entry)
        await eventually(lambda: not any(encoder.open for encoder in b.encoders))


async def test_a_request_that_leaves_before_its_header_closes_both_streams() -> None:
    async with bench(*(ScriptedEncoder([is_alive]) for _ in range(2)), hedge=HEDGE) as b:
        await b.usable(2)
        asking = asyncio.create_task(b.receiver.fetch_headers(request(b"picture")))
        await eventually(lambda: all(encoder.open for encoder in b.encoders))
        asking.cancel()
        await asyncio.wait({asking})
        await eventually(lambda: not any(encoder.open for encoder in b.encoders))


async def test_rows_in_parts_are_asked_for_elsewhere_in_parts() -> None:
    async def brings_its_part(call: Call) -> None:
        call.data = call.data or b"picture"
        await call.header()
        if not call.request.end_rows:
            await asyncio.Event().wait()
        first = (call.request.first_rows or [0])[0]
        await call.rows(first, call.request.end_rows[0] - first)
        await call.done()

    async def is_alive_in_every_part(call: Call) -> None:
        call.data = call.data or b"picture"
        await is_alive_after_the_header(call)

    by_parts = {"connections": 3, "part_bytes": 4 * LAYOUT.row_bytes}
    async with bench(ScriptedEncoder(), ScriptedEncoder(), hedge=HEDGE, **by_parts) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script, second.script = [is_alive_in_every_part], [brings_its_part]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (4, 4)
        assert b.cache.counters.received == ROWS


async def takes_all_its_time(call: Call) -> None:
    await call.header()
    await call.breaks(grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_an_item_that_takes_too_long_has_one_try_at_another_encoder_and_no_third() -> None:
    async with bench(*(ScriptedEncoder([takes_all_its_time]) for _ in range(3))) as b:
        await b.usable(3)
        with pytest.raises(Unavailable) as error:
            await b.whole(b"picture")
        assert (error.value.reason, error.value.field) == ("ENCODER_SLOW", "here[0]")
        assert sorted(len(encoder.calls) for encoder in b.encoders) == [0, 1, 1]
