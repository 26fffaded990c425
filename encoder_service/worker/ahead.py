"""Getting the next batch ready while one is computed: on a GPU, resizing and cutting the next pictures hides behind the
tower of those before.

The service sends a GPU's worker the batch after the one that it computes, as soon as that is full. A thread takes it,
copies its pixels to the device and makes patches of them on a stream of its own, while the main thread waits for the
tower on another. On a CPU both would want the same cores, so there one thing is done after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

JobT = TypeVar("JobT")
ReadyT = TypeVar("ReadyT")


def in_turn(jobs: Iterable[JobT], prepare: Callable[[JobT], ReadyT]) -> Iterator[Future[ReadyT]]:
    """Each job when it is asked for: prepared, or failed with a RuntimeError."""
    for job in jobs:
        yield _attempt(prepare, job)


def ahead(jobs: Iterable[JobT], prepare: Callable[[JobT], ReadyT]) -> Iterator[Future[ReadyT]]:
    """As `in_turn`, in the same order, but the next jobs are prepared in a thread before they are asked for.

    How far ahead is up to who gives the jobs. Any other error of theirs, or of `prepare`, is raised here as well.
    """
    ready: SimpleQueue[Future[ReadyT] | BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            for future in in_turn(jobs, prepare):
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


def _attempt(prepare: Callable[[JobT], ReadyT], job: JobT) -> Future[ReadyT]:
    future: Future[ReadyT] = Future()
    try:
        future.set_result(prepare(job))
    except RuntimeError as error:  # out of memory, or a kernel that failed
        future.set_exception(error)
    return future
