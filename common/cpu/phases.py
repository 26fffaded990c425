"""How the threads of one kernel share its work: in phases of tasks, each of which any thread may take.

Threads start once. Each takes the tasks of its own share, then those of others; a phase ends when all its tasks are
done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.cpu.jit import inner
from common.cpu.vectors.claims import count_up, counted, let_others_run, pause
from common.cpu.vectors.llvm import LINE

_APART = LINE // 8
"""int64s from one counter to the next: each is in a cache line of its own, against false sharing."""
_PATIENCE = 200
"""A waiting thread yields its core after so many polls, about ten microseconds."""


@inner
def counts_of(phases: Any, threads: Any) -> Any:
    """int64 [phases, threads + 1, 8], of which the first of the last numbers counts: what is taken of each thread's
    share of a phase, and behind these what is done of all."""
    return np.zeros((phases, threads + 1, _APART), np.int64)


@inner
def take(counts: Any, phase: Any, thread: Any, tasks: Any) -> Any:
    """A task from 0 to `tasks` − 1 that no other thread gets, or −1 if none is left. If anybody waits for the phase,
    whoever takes a task calls `done`.

    First come the tasks of the thread's own share, which are adjacent in memory. Nobody waits for a thread that has
    taken nothing, so a kernel ends whichever of its threads run, and in whatever order.
    """
    threads = counts.shape[1] - 1
    for more in range(threads):
        share = (thread + more) % threads
        begin, end = first_of(share, threads, tasks), first_of(share + 1, threads, tasks)
        if counts[phase, share, 0] >= end - begin:
            continue
        index = count_up(counts[phase, share].ctypes.data)
        if index < end - begin:
            return begin + index
    return -1


@inner
def first_of(share: Any, threads: Any, tasks: Any) -> Any:
    """Where a thread's share of tasks begins."""
    return tasks * share // threads


@inner
def done(counts: Any, phase: Any) -> Any:
    """Marks a task as done; what it wrote is visible to whoever has waited for the phase."""
    count_up(counts[phase, counts.shape[1] - 1].ctypes.data)


@inner
def wait(counts: Any, phase: Any, tasks: Any) -> Any:
    """Returns when all tasks of a phase are done."""
    place, looks = counts[phase, counts.shape[1] - 1].ctypes.data, 0
    while counted(place) < tasks:
        pause()
        looks += 1
        if looks > _PATIENCE:
            let_others_run()
