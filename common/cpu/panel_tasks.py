"""How threads share a product of rows with a weight in panels: rows are packed, and then tasks, each of some rows and
some panels, are multiplied."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from common.cpu.jit import Array, inner
from common.cpu.phases import done, take, wait

SIZE = numba.types.UniTuple(numba.intp, 2)
"""The type of a task's `size`: how many rows and how many panels."""


@inner
def count_tasks(rows: Any, panels: Any, size: Any) -> Any:
    """The number of tasks for `rows` rows and `panels` panels, with `size` of each per task."""
    most, together = size
    return (rows + most - 1) // most * ((panels + together - 1) // together)


@inner
def task_at(index: Any, rows: Any, panels: Any, size: Any) -> Any:
    """One of them: its first row, its rows, its first panel, and its panels."""
    most, together = size
    parts = (rows + most - 1) // most
    begin, first = index % parts * most, index // parts * together
    return begin, min(most, rows - begin), first, min(together, panels - first)


def product_work(pack: Any, multiply: Any) -> Any:
    """One thread's part of a product, as `parallel_for` takes it: it packs rows by `pack(row, given)` and, once all
    rows are packed, multiplies tasks by `multiply(task, given)`, each as `task_at` gives it."""

    @inner
    def work(thread: Any, counts: Any, rows: Any, panels: Any, size: Any, given: Any) -> None:
        row = take(counts, 0, thread, rows)
        while row >= 0:
            pack(row, given)
            done(counts, 0)
            row = take(counts, 0, thread, rows)
        wait(counts, 0, rows)
        tasks = count_tasks(rows, panels, size)
        index = take(counts, 1, thread, tasks)
        while index >= 0:
            multiply(task_at(index, rows, panels, size), given)
            index = take(counts, 1, thread, tasks)

    return work


def check_rows(x: Array, inputs: int) -> None:
    """Raises ValueError where x is not float32 [m, inputs]."""
    if x.ndim != 2 or x.shape[1] != inputs or x.dtype != np.float32:
        raise ValueError(f"{x.dtype} {x.shape} does not fit a weight of {inputs} inputs")
