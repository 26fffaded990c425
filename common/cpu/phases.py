"""How the threads of one kernel divide what it does: in phases of tasks, each of which any thread may take.

Threads begin once. Each takes tasks of its own share, then of the others'; a phase ends when all of its tasks are done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.cpu.jit import inner
from common.cpu.vectors.claims import count_up, counted, let_others_run, pause
from common.cpu.vectors.llvm import LINE

_APART = LINE // 8
"""Numbers from one count to the next: each has a line of its own, which those who count elsewhere do not take away."""
_PATIENCE = 200
"""Looks after which a thread that waits lets others run between two: some ten microseconds."""


@inner
def counts_of(phases: Any, threads: Any) -> Any:
    """int64 [phases, threads + 1, 8], of which the first of the last numbers counts: what is taken of each thread's
    share of a phase, and behind these what is done of all."""
    return np.zeros((phases, threads + 1, _APART), np.int64)


@inner
def take(counts: Any, phase: Any, thread: Any, tasks: Any) -> Any:
    """A task of 0 to `tasks` that nobody else is given, or -1 where there is none left. Who takes one calls `done`,
    if anybody waits for the phase.

    First come those of the thread's own share, which lie side by side in memory. Nobody waits for a thread that has
    not taken anything, so a kernel ends whichever of its threads are run, and in whatever order."""
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
    """A task that was taken is done: what it wrote can be read by whoever has waited for the phase."""
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
