"""Background tasks whose failure is not lost, and work in threads: that is waited for, or that nobody can wait for."""

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
    """Ends this process at once, after a defect that nothing here mends: its children end with it, its callers go
    elsewhere or hear of it, and whoever keeps it starts it anew. Going on would have them wait for nothing."""
    os._exit(EXIT_DEFECT)


def start_vital(
    work: Coroutine[Any, Any, None], name: str, die: Callable[[], None] = end_process
) -> asyncio.Task[None]:
    """As `start`, for a task without which nothing is served: an exception that ends it ends the process, by `die`."""
    task = start(work, name)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            die()

    task.add_done_callback(ended)  # after the one that logs why
    return task


class _Threads:
    """Those in which this process does work; None: the loop's own, which begin when there is work for them."""

    pool: ThreadPoolExecutor | None = None


def start_threads() -> None:
    """Starts all threads for `to_thread`. A loop starts its own when there is work for them, and one more to end them.
    Where none can be had then, the work fails, and may be done when nobody waits for it any more.

    Raises OSError where there are not as many to be had.
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
    """Runs `work` in a thread, as `asyncio.to_thread` does, in one of those that were started."""
    call = partial(contextvars.copy_context().run, work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(_Threads.pool, call)


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs `work` in a thread, and does not leave before it has ended: it may be writing to memory that is leased."""
    task = asyncio.ensure_future(to_thread(work, *args))
    await wait_until_done(task)
    return task.result()


def in_daemon_thread(work: Callable[..., T], *args: Any) -> Future[T]:
    """Runs `work` in a thread of its own that may still be at it when the process ends: a look-up of a name, say, which
    nothing can cut short. For a thread of a pool the interpreter would wait."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can take it back

    def run() -> None:
        try:
            result = work(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        # A `threading.Thread` is waited for until it runs: for ever, where memory runs out before it does.
        _thread.start_new_thread(run, ())
    except (MemoryError, RuntimeError) as error:  # no thread can be had
        future.set_exception(error)
    return future


class Backoff:
    """What is tried again waits: not at first, then a second, and twice as long each time, `longest` at most."""

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
            work.exception()  # which nobody will ask for
        raise left


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("a task failed", task=task.get_name(), exc_info=error)


class StallTolerantTimer:
    """Calls `then` after so many seconds, for what others send: where this loop stood still until after the time was
    up, what they sent meanwhile is still to be read, and gets a moment more in which to `cancel`."""

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
    """`asyncio.timeout` by a `StallTolerantTimer`. Raises TimeoutError at the end of the block."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._timer = StallTolerantTimer(self._seconds, self._over)

    def _over(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)
