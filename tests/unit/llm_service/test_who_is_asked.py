"""Which encoder is asked for an item, over real gRPC: its own, another where that is full, all for a key alone."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import grpc
import pytest

from common.errors import Exhausted, NotFound, Unavailable
from common.media.item import Key, Modality, Url
from llm_service.encoders import choice
from llm_service.encoders import pool as pool_module
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncoderSettings
from llm_service.request import MediaItem, Request
from tests.unit.llm_service.scripted import (
    DIGEST,
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
    hangs_after_the_header,
    is_full,
    key_of,
    request,
    settled,
    well,
)
from twinlens import v1


async def test_an_encoder_of_another_model_is_never_asked() -> None:
    async with bench(ScriptedEncoder(digest="another")) as b:
        await eventually(lambda: b.pool.replicas)
        with pytest.raises(Unavailable) as error:
            await b.land(b"picture")
        assert error.value.reason == "NO_ENCODER"
        assert b.encoders[0].calls == []


async def test_an_encoder_that_was_replaced_by_one_of_another_model_since_it_was_asked_gives_no_rows() -> None:
    """What an address gives has no key that would tell."""
    by_address = replace(
        request(b""), media=(MediaItem(Modality.IMAGE, Url("https://example.org/x"), field="here[0]"),)
    )
    async with bench(ScriptedEncoder(), check_seconds=600) as b:
        await b.usable(1)
        b.encoders[0].digest = "another"
        with pytest.raises(Unavailable):
            await b.take(by_address)
        assert b.encoders[0].calls


async def test_a_request_waits_a_moment_for_an_encoder_that_is_about_to_be_there() -> None:
    # A moment of a slow machine. It is asked before the first answer to GetInfo has come.
    async with bench(ScriptedEncoder(), pick_seconds=60) as b:
        assert await b.whole(b"picture") == content(b"picture")


async def test_repeats_go_where_they_went_and_different_items_are_spread() -> None:
    async with bench(*(ScriptedEncoder() for _ in range(3)), check_seconds=600) as b:  # nobody is late, or suspected
        await b.usable(3)
        for _ in range(2):
            for number in range(40):
                await b.whole(b"picture %d" % number)
        seen = [{call.data for call in encoder.calls} for encoder in b.encoders]
        assert all(seen)
        assert sum(map(len, seen)) == 40, "one picture went to two encoders"


def first_asked_of(b: Bench, encoder: ScriptedEncoder, count: int) -> list[bytes]:
    """Pictures that this encoder is the first to be asked for."""
    names = (b"picture %d" % number for number in itertools.count())
    return [*itertools.islice((name for name in names if b.first_and_second(name)[0] is encoder), count)]


async def test_a_crowded_encoder_is_passed_over() -> None:
    scripts = [hangs_after_the_header]
    async with bench(ScriptedEncoder(scripts), ScriptedEncoder(scripts), rows=12 * ROWS, check_seconds=600) as b:
        await b.usable(2)
        first, second = b.encoders
        # Twelve pictures that are all the first encoder's: it is asked until eight calls are under way there.
        held = [await b.land(name) for name in first_asked_of(b, first, 12)]
        await eventually(lambda: (first.open, second.open) == (8, 4))
        for (entry,) in held:
            b.cache.release(entry)


async def announces_much(call: Call) -> None:
    await call.header(grid=v1.Grid(t=1, h=256, w=256), tokens=128 * 128)
    await asyncio.Event().wait()


async def test_what_an_encoder_has_announced_counts_before_it_is_asked_for_its_load() -> None:
    script = [announces_much]
    async with bench(ScriptedEncoder(script), ScriptedEncoder(script), rows=128 * 128, check_seconds=600) as b:
        await b.usable(2)
        first, second = b.encoders
        its_own = first_asked_of(b, first, 2)
        asking = await b.receiver.fetch_headers(request(its_own[0], its_own[0]))  # two streams, one item
        assert sorted(replica.load for replica in b.pool.replicas) == [0, 256 * 256]
        (entry,) = await b.land(its_own[1])
        assert (len(first.calls), len(second.calls)) == (2, 1)
        b.receiver.close(asking)
        b.cache.release(entry)
        await eventually(lambda: not any(replica.load for replica in b.pool.replicas))


async def is_full_for_no_time(call: Call) -> None:
    status = v1.Status(code=8, message="full", reason="QUEUE_FULL", retry_after_ms=0)
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


async def test_an_encoder_that_is_full_and_names_no_time_is_not_asked_without_end() -> None:
    async with bench(ScriptedEncoder([is_full_for_no_time]), ScriptedEncoder([is_full_for_no_time])) as b:
        await b.usable(2)
        with pytest.raises(Exhausted):
            await b.land(b"picture")
        assert b.receiver.counters.attempts <= 2 * 34, "30 ms lie between one time and the next, within a second"


async def test_patience_ends_where_encoders_refuse_for_less_time_than_it_takes_to_ask_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "_LEAST_HINT", 0.0)
    async with bench(*(ScriptedEncoder([is_full_for_no_time]) for _ in range(2)), patience=0.1) as b:
        await b.usable(2)
        with pytest.raises(Exhausted) as error:
            await asyncio.wait_for(b.land(b"picture"), 180)
        assert error.value.reason == "QUEUE_FULL"
        assert all(encoder.calls for encoder in b.encoders)


async def test_who_has_no_patience_is_refused_by_every_encoder_first() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), check_seconds=600) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [is_full_for_no_time]
        (entry,) = await b.land(b"picture", deadline=asyncio.get_running_loop().time())
        await settled(entry)
        assert entry.error is None
        b.cache.release(entry)
        assert (len(first.calls), len(second.calls)) == (1, 1)


async def test_where_one_encoder_is_full_the_other_is_asked_at_once() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [is_full]
        assert await b.whole(b"picture") == content(b"picture")
        assert (len(first.calls), len(second.calls)) == (1, 1)
        assert b.receiver.counters.retries == 0, "being sent away costs no retry"


async def test_an_encoder_whose_leases_run_out_in_the_middle_is_no_broken_one() -> None:
    async def has_no_lease_left(call: Call) -> None:
        await call.header()
        await call.rows(0)
        status = v1.Status(code=8, message="full", reason="LEASES_FULL", retry_after_ms=60_000)
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script = [has_no_lease_left]
        assert await b.whole(b"picture") == content(b"picture")
        assert [list(call.request.first_rows) for call in second.calls] == [[RUN]], "what has landed is kept"
        (replica,) = [replica for replica in b.pool.replicas if replica.address == first.address]
        assert (replica.full, replica.usable, replica.breaker.failures) == (True, True, 0)
        assert b.receiver.counters.retries == 0


async def test_where_all_encoders_are_full_an_item_waits_for_room() -> None:
    async with bench(ScriptedEncoder([is_full, is_full, well]), patience=600) as b:
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


async def has_it_not(call: Call) -> None:
    status = v1.Status(code=5, message="no such key", reason="KEY_NOT_FOUND", field="items[0].key")
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


async def has_it(call: Call) -> None:
    await call.header(key=call.request.items[0].key)
    await call.rows(0, ROWS)
    await call.done()


async def damages_the_header(call: Call) -> None:
    await call.header(crc32c=1)


async def is_cut_off(call: Call) -> None:
    """By what lies between, as it seems: the encoder answers when it is asked whether it is there."""
    await call.context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was reset")


def by_key(key: bytes) -> Request:
    return replace(request(b""), media=(MediaItem(Modality.IMAGE, Key(key), field="here[0]"),))


async def test_a_key_is_sought_at_every_encoder() -> None:
    async with bench(*(ScriptedEncoder([has_it_not]) for _ in range(3))) as b:
        await b.usable(3)
        with pytest.raises(NotFound):
            await b.take(by_key(b"k" * 32))
        assert [len(encoder.calls) for encoder in b.encoders] == [1, 1, 1]
        b.encoders[1].script = [has_it]
        (entry,) = await b.take(by_key(b"k" * 32))
        await settled(entry)
        assert entry.error is None
        b.cache.release(entry)


@pytest.mark.parametrize("fails", [is_full, damages_the_header, is_cut_off])
async def test_a_key_is_not_missing_while_an_encoder_that_may_have_it_has_not_said_so(fails: Say) -> None:
    """The encoder that has it fails to say so at first, and the other one has it not."""
    async with bench(ScriptedEncoder(), ScriptedEncoder(), patience=600) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script, second.script = [fails, has_it], [has_it_not]
        (entry,) = await b.take(by_key(key_of(b"picture")))
        await settled(entry)
        assert entry.error is None
        b.cache.release(entry)
        assert (len(first.calls), len(second.calls)) == (2, 1)


async def test_who_has_a_key_may_stay_full_and_who_has_it_not_is_asked_once() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder(), check_seconds=600) as b:  # nobody is late, or suspected
        await b.usable(2)
        first, second = b.first_and_second(b"picture")
        first.script, second.script = [is_full], [has_it_not]
        with pytest.raises(Exhausted):
            await b.take(by_key(key_of(b"picture")))
        assert len(second.calls) == 1
        assert len(first.calls) <= 30, "it was asked without a pause"


async def test_who_has_a_key_may_go_and_who_has_it_not_is_asked_once() -> None:
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        first, second = b.first_and_second(b"picture")

        async def goes(call: Call) -> None:
            call.ending = asyncio.create_task(first.server.stop(None))
            await asyncio.Event().wait()

        first.script, second.script = [goes], [has_it_not]
        with pytest.raises(NotFound):
            await b.take(by_key(key_of(b"picture")))
        assert len(second.calls) == 1


@pytest.mark.parametrize("bad", ["no-such-name.invalid", "label" * 20 + ".invalid", "a..b"])
async def test_a_name_is_looked_up_and_one_that_cannot_be_hurts_no_other(bad: str) -> None:
    async with bench(ScriptedEncoder()) as b:
        port = b.encoders[0].address.rpartition(":")[2]
        addresses = (f"dns:///{bad}:7001", f"dns:///localhost:{port}")
        pool = EncoderPool(addresses, EncoderSettings(digest=DIGEST, layout=LAYOUT, merge=2))
        await pool.start()
        await eventually(lambda: any(replica.usable for replica in pool.replicas))
        await pool.stop()


async def test_an_encoder_whose_certificates_cannot_be_read_just_now_is_taken_up_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0

    class Late(Replica):
        def __init__(self, *given: Any) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise FileNotFoundError("ca.pem")
            super().__init__(*given)

    monkeypatch.setattr(pool_module, "Replica", Late)
    async with bench(ScriptedEncoder(), resolve_seconds=0.01) as b:
        await b.usable(1)
        assert tries == 2
