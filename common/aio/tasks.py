"""Background tasks whose failures are not lost, and work in threads."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from common.telemetry import log

_log = log.get("tasks")

T = TypeVar("T")

_MOST_THREADS = 32

EXIT_DEFECT = 70
"""How a process ends that has found a defect in itself: EX_SOFTWARE of sysexits.h."""


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task; an exception that ends it is logged. The caller keeps the task, and cancels it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def end_process() -> None:
    """Ends this process at once, after a defect that cannot be repaired: its children end with it, callers go elsewhere
    or get an error, and a supervisor restarts it. Otherwise callers would wait for nothing."""
    os._exit(EXIT_DEFECT)


def start_vital(
    work: Coroutine[Any, Any, None], name: str, die: Callable[[], None] = end_process
) -> asyncio.Task[None]:
    """As `start`, for a task that the service cannot do without: an exception ends the process, by `die`."""
    task = start(work, name)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            die()

    task.add_done_callback(ended)  # after the one that logs why
    return task


class _Threads:
    """The threads in which this process works; None: the event loop's own, which start on demand."""

    pool: ThreadPoolExecutor | None = None


def start_threads() -> None:
    """Starts all threads for `to_thread`. An event loop starts its threads on demand, and one more to stop them. If
    none can be started then, the work fails, or is done when nobody waits for it any more.

    Raises OSError if not all can be started.
    """
    count = min(_MOST_THREADS, (os.cpu_count() or 1) + 4)
    pool, begun = ThreadPoolExecutor(count, "work"), threading.Barrier(count)
    try:
        for _ in range(count):
            pool.submit(begun.wait)  # each waits for the last: none is free to take another's place
    except RuntimeError as error:
        begun.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise OSError(f"not even {count} threads can be started: {error}") from error
    _Threads.pool = pool


async def to_thread(work: Callable[..., T], *args: Any, **named: Any) -> T:
    """Runs `work` in one of the threads started before, as `asyncio.to_thread` would."""
    call = partial(contextvars.copy_context().run, work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(_Threads.pool, call)


async def compute(work: Callable[..., T], *args: Any, at_once: bool) -> T:
    """The result of `work`: on the event loop if `at_once`, else by a thread, since it may take long."""
    return work(*args) if at_once else await to_thread(work, *args)


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs `work` in a thread, and does not leave before it has ended: it may be writing to memory that is leased."""
    task = asyncio.ensure_future(to_thread(work, *args))
    await wait_until_done(task)
    return task.result()


def in_daemon_thread(work: Callable[..., T], *args: Any) -> Future[T]:
    """Runs `work` in a thread of its own that may still be running when the process ends, such as a name look-up, which
    cannot be interrupted. The interpreter would wait for a pool's thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            result = work(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        # `threading.Thread.start` waits until the thread runs: forever, if memory runs out before.
        _thread.start_new_thread(run, ())
    except (MemoryError, RuntimeError) as error:  # no thread can be had
        future.set_exception(error)
    return future


class Backoff:
    """Delays between attempts: none at first, then a second, doubled each time, at most `longest`."""

    def __init__(self, longest: float) -> None:
        self.seconds = 0.0
        """How long the next `wait` is."""
        self._longest = longest

    async def wait(self) -> None:
        """Returns when it is time for the next trial."""
        await asyncio.sleep(self.seconds)
        self.seconds = min(max(1.0, 2 * self.seconds), self._longest)


async def wait_until_done(work: asyncio.Future[Any]) -> None:
    """Returns when `work` has ended, however it did; a caller that is cancelled meanwhile leaves no sooner."""
    left: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            left = error
    if left is not None:
        if not work.cancelled():
            work.exception()  # nobody else will retrieve it
        raise left


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("a task failed", task=task.get_name(), exc_info=error)


class StallTolerantTimer:
    """Calls `then` after so many seconds unless `cancel`led by a message. If this event loop stood still beyond that
    time, messages received meanwhile are still to be read, and get a moment more."""

    _STALL = 0.05
    _DOUBT = 0.5

    def __init__(self, seconds: float, then: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._over, then)

    def _over(self, then: Callable[[], object]) -> None:
        if self._loop.time() - self._due > self._STALL:
            self._timer = self._loop.call_later(self._DOUBT, then)
        else:
            then()

    def cancel(self) -> None:
        """Nothing is called any more."""
        self._timer.cancel()


class StallTolerantTimeout:
    """`asyncio.timeout` by a `StallTolerantTimer`. Raises TimeoutError at the end of the block.

    When the time is over, `more` tells how many seconds are added, if that is above 0.
    """

    def __init__(self, seconds: float, more: Callable[[], float] = lambda: 0.0) -> None:
        self._seconds = seconds
        self._more = more
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._timer = StallTolerantTimer(self._seconds, self._over)

    def _over(self) -> None:
        if (seconds := self._more()) > 0:
            self._timer = StallTolerantTimer(seconds, self._over)
            return
        self._limit.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)
