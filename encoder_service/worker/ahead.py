"""Jobs that are done in parts, one after the other: each part is prepared when it is asked for, or before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

JobT = TypeVar("JobT")
ReadyT = TypeVar("ReadyT")
Hungry = Callable[[], bool]
Prepare = Callable[[JobT, Hungry], Iterator[ReadyT]]
"""Prepares parts of a job, one after the other; it is told whether somebody waits for the next one."""


def one_by_one(
    jobs: Iterable[JobT], prepare: Prepare[JobT, ReadyT], hungry: Hungry = lambda: False
) -> Iterator[Future[ReadyT]]:
    """Each part of each job when it is asked for: prepared, or failed with a RuntimeError, the last of its job then."""
    for job in jobs:
        parts = prepare(job, hungry)
        while True:
            future: Future[ReadyT] = Future()
            try:
                future.set_result(next(parts))
            except StopIteration:
                break
            except RuntimeError as error:  # out of memory, or a kernel that failed
                future.set_exception(error)
                yield future
                break
            yield future


def ahead(jobs: Iterable[JobT], prepare: Prepare[JobT, ReadyT]) -> Iterator[Future[ReadyT]]:
    """As `one_by_one`, in the same order, but the next parts are prepared in a thread in advance; while none is ready,
    the consumer is hungry.

    How far in advance is up to the source of the jobs. Other errors of the source, or of `prepare`, are raised here as
    well.
    """
    ready: SimpleQueue[Future[ReadyT] | BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            for future in one_by_one(jobs, prepare, ready.empty):
                ready.put(future)
        except BaseException as error:  # noqa: BLE001 - it is raised where jobs are waited for
            ready.put(error)
        else:
            ready.put(None)

    threading.Thread(target=work, name="ahead", daemon=True).start()
    while (future := ready.get()) is not None:
        if isinstance(future, BaseException):
            raise future
        yield future
