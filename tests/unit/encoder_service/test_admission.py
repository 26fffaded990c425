"""How much the encoder holds at once: items and bytes, whoever comes and goes."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Exhausted
from encoder_service.engine.admission import Admission

ITEMS, BYTES = 4, 100


def test_past_the_items_the_next_is_refused_with_a_hint_until_one_leaves():
    admission = Admission(1, BYTES)
    with admission.reserve(0, "items[0]"), pytest.raises(Exhausted) as refused, admission.reserve(0, "items[1]"):
        pass
    assert (refused.value.reason, refused.value.field) == ("QUEUE_FULL", "items[1]")
    assert refused.value.retry_after
    with admission.reserve(0, "items[0]"):
        pass
    admission.check_idle()


def test_past_the_bytes_the_next_is_refused_but_one_alone_may_be_of_any_size():
    admission = Admission(ITEMS, BYTES)
    with admission.reserve(10 * BYTES, "x"), pytest.raises(Exhausted), admission.reserve(1, "y"):
        pass
    with admission.reserve(BYTES - 1, "x"), admission.reserve(1, "y"):
        pass


def test_what_is_downloaded_counts_when_it_is_there():
    admission = Admission(ITEMS, BYTES)
    with admission.reserve(1, "x") as reservation, admission.reserve(1, "y") as other:
        reservation.resize(90)
        with pytest.raises(Exhausted):
            other.resize(50)
        assert (reservation.size, other.size, admission.bytes) == (90, 1, 91)
    admission.check_idle()


def test_a_download_that_is_alone_may_be_of_any_size():
    admission = Admission(ITEMS, BYTES)
    with admission.reserve(30, "x") as reservation:
        reservation.resize(10 * BYTES)
        assert admission.bytes == 10 * BYTES


@given(st.lists(st.tuples(st.sampled_from(["come", "leave", "resize"]), st.integers(0, 60)), max_size=60))
def test_whoever_comes_and_goes_the_bounds_hold_and_nothing_is_left(steps):
    async def play() -> None:
        admission, inside = Admission(ITEMS, BYTES), []
        for what, number in steps:
            with suppress(Exhausted):
                if what == "come":
                    stack = ExitStack()
                    inside.append((stack, stack.enter_context(admission.reserve(number, "x"))))
                elif inside and what == "leave":
                    inside.pop(number % len(inside))[0].close()
                elif inside:
                    inside[number % len(inside)][1].resize(number)
            held = [reservation.size for _, reservation in inside]
            assert (admission.items, admission.bytes) == (len(held), sum(held))
            assert len(held) <= ITEMS
            assert sum(held) <= BYTES or len(held) == 1
        for stack, _ in inside:
            stack.close()
        admission.check_idle()
        async with asyncio.timeout(180):
            await admission.drain()

    asyncio.run(play())
