"""The next batch is got ready while one is computed, in order, and whatever fails fails in its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from encoder_service.worker.ahead import Hungry, ahead, one_by_one


def by_part(prepare: Callable[[int], Any]) -> Callable[[int, Hungry], Iterator[Any]]:
    """Jobs of one part."""

    def parts(job: int, _: Hungry) -> Iterator[Any]:
        yield prepare(job)

    return parts


WAYS = pytest.mark.parametrize("take", [ahead, one_by_one])


@WAYS
def test_jobs_come_ready_and_in_order(take: Callable) -> None:
    assert [each.result() for each in take(range(50), by_part(lambda job: job * 10))] == list(range(0, 500, 10))


@WAYS
def test_a_job_that_fails_fails_in_its_turn_and_the_next_goes_on(take: Callable) -> None:
    def prepare(job: int) -> int:
        if job == 1:
            raise RuntimeError("no memory")
        return job

    first, second, third = take(range(3), by_part(prepare))
    assert (first.result(), third.result()) == (0, 2)
    with pytest.raises(RuntimeError, match="no memory"):
        second.result()


@WAYS
def test_what_is_no_failure_of_a_job_ends_the_worker(take: Callable) -> None:
    def jobs() -> Iterator[int]:
        yield 0
        raise AssertionError("not a batch")

    ready = take(jobs(), by_part(lambda job: job))
    assert next(ready).result() == 0
    with pytest.raises(AssertionError, match="not a batch"):
        next(ready)


def test_the_next_job_is_prepared_while_one_is_computed() -> None:
    """Were it not, the first would wait for ever."""
    begun = [threading.Event() for _ in range(4)]

    def prepare(job: int) -> int:
        begun[job].set()
        return job

    for prepared in ahead(range(3), by_part(prepare)):
        if (job := prepared.result()) < 2:
            assert begun[job + 1].wait(180)
    assert not begun[3].is_set()


def test_in_turn_nothing_is_prepared_before_it_is_asked_for() -> None:
    prepared: list[int] = []
    ready = one_by_one(range(3), by_part(prepared.append))
    next(ready)
    assert prepared == [0]


@WAYS
def test_a_job_has_several_parts_and_the_one_that_fails_is_its_last(take: Callable) -> None:
    def parts(job: int, _: Hungry) -> Iterator[int]:
        yield job
        if job == 1:
            raise RuntimeError("no memory")
        yield 10 * job

    found = [each.exception() or each.result() for each in take([1, 2], parts)]
    assert [str(each) for each in found] == ["1", "no memory", "2", "20"]


def test_whoever_takes_parts_is_hungry_while_none_is_ready() -> None:
    told: list[bool] = []
    taken, looked = threading.Event(), threading.Event()

    def parts(_: int, hungry: Hungry) -> Iterator[int]:
        yield 0
        assert taken.wait(180)
        told.append(hungry())
        yield 1
        told.append(hungry())
        looked.set()

    waiting = ahead([0], parts)
    next(waiting)
    taken.set()
    assert looked.wait(180)
    assert [each.result() for each in waiting] == [1]
    assert told == [True, False]
