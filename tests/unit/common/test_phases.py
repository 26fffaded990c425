"""Threads of one kernel divide phases of tasks, whichever of them are run, and in whatever order."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from common.cpu.phases import counts_of, done, first_of, take, wait

TASKS = 37


@numba.njit(nogil=True)
def work(counts: Any, thread: Any, first: Any, second: Any, takers: Any) -> None:
    """Counts up what each task is given; a task of the second phase adds up what the first has made of all."""
    task = take(counts, 0, thread, len(first))
    while task >= 0:
        first[task] += task + 1
        takers[task] = thread
        done(counts, 0)
        task = take(counts, 0, thread, len(first))
    wait(counts, 0, len(first))
    task = take(counts, 1, thread, len(second))
    while task >= 0:
        second[task] += first.sum()
        done(counts, 1)
        task = take(counts, 1, thread, len(second))


@numba.njit(nogil=True)
def in_order(counts: Any, order: Any, first: Any, second: Any, takers: Any) -> None:
    for thread in order:
        work(counts, thread, first, second, takers)


@numba.njit(parallel=True)
def together(threads: Any, first: Any, second: Any, takers: Any) -> None:
    counts = counts_of(2, threads)
    for thread in numba.prange(threads):
        work(counts, np.intp(thread), first, second, takers)


@numba.njit
def new_counts(threads: int) -> np.ndarray[Any, Any]:
    return counts_of(2, threads)


def rooms() -> list[np.ndarray[Any, Any]]:
    return [np.zeros(TASKS, np.int64), np.zeros(5, np.int64), np.full(TASKS, -1)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1], [2, 2]])
def test_threads_that_run_one_after_the_other_do_all(order: list[int]) -> None:
    first, second, takers = rooms()
    in_order(new_counts(3), np.array(order), first, second, takers)
    assert (first == np.arange(1, TASKS + 1)).all()
    assert (second == first.sum()).all()
    assert (takers == order[0]).all()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_that_run_at_once_do_each_task_once_and_a_phase_after_the_other(threads: int) -> None:
    for _ in range(50):
        first, second, takers = rooms()
        together(threads, first, second, takers)
        assert (first == np.arange(1, TASKS + 1)).all()
        assert (second == first.sum()).all()
        assert ((takers >= 0) & (takers < threads)).all()


def test_a_thread_takes_of_its_own_share_first_and_then_of_the_others_in_turn() -> None:
    counts = new_counts(3)

    @numba.njit
    def taken(counts: Any) -> list[int]:
        return [take(counts, 0, 1, 6) for _ in range(8)]

    assert taken(counts) == [2, 3, 4, 5, 0, 1, -1, -1]
    assert [first_of.py_func(share, 3, 7) for share in range(4)] == [0, 2, 4, 7]
