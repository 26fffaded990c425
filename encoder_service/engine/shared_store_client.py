"""One Redis or Valkey server as a cache: every answer comes within a bound, every transfer goes on or is given up, or
it counts as a miss. Nothing here raises because of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import valkey.asyncio as valkey
from valkey.exceptions import ResponseError

from common.telemetry import log

_SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")

_QUESTIONS, _TRANSFERS = 16, 16
"""Most of each at once, each on its own connection: large rows do not delay questions."""

_SLOWEST = 8 << 20
"""Bytes per second below which a transfer is given up."""

_FAILURES = 3
"""Failures in a row after which the server is left alone for a while."""

_SHORTEST_REST, _LONGEST_REST = 0.5, 30.0

T = TypeVar("T")
Progressed = Callable[[Any], Any]
"""Records an answer, which it returns, and restarts the time limit for the next."""

_log = log.get("shared store")


class Breaker:
    """A circuit breaker: pauses after repeated failures; then one call tests the server."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures = 0
        self._rest = _SHORTEST_REST
        self._until = 0.0
        self._trying = False

    def allows(self) -> bool:
        """Whether the server may be called; after failures, by one caller at a time."""
        if self._failures < _FAILURES:
            return True
        if self._trying or self._now() < self._until:
            return False
        self._trying = True
        return True

    @property
    def is_open(self) -> bool:
        """Whether calls are paused."""
        return self._failures >= _FAILURES

    def succeeded(self) -> None:
        """The server answered."""
        self._failures, self._rest, self._trying = 0, _SHORTEST_REST, False

    def failed(self) -> None:
        """The server could not be reached or did not answer in time. Calls that were in flight when the breaker opened
        do not count."""
        self._failures += 1
        if self._failures == _FAILURES or self._trying:
            self._until = self._now() + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        self._trying = False

    def abandoned(self) -> None:
        """The call was given up by its caller; it says nothing of the server."""
        self._trying = False


def check_url(url: str) -> None:
    """Raises ValueError, which does not contain the password, for an invalid address."""
    if not url.startswith(_SCHEMES):
        raise ValueError(f"the address must begin with one of {' '.join(_SCHEMES)}")
    try:
        pool = _connections(url, 1.0)
        pool.connection_class(**pool.connection_kwargs)  # this does not connect yet
    except (ValueError, TypeError):
        raise ValueError("the address cannot be parsed, or has an unknown option") from None


def _connections(url: str, seconds: float) -> valkey.BlockingConnectionPool:
    return valkey.BlockingConnectionPool.from_url(
        url,
        max_connections=_QUESTIONS + _TRANSFERS,
        timeout=seconds,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        retry=None,
    )


class SharedStoreClient:
    """A pool of connections to one server, behind a circuit breaker. `close` is called by the owner.

    `url` may contain user, password, database and TLS settings. An answer, and each part of a transfer, may take
    `seconds`. `counts` are totals since start.
    """

    def __init__(self, url: str, *, seconds: float, breaker: Breaker | None = None) -> None:
        self._server = valkey.Valkey.from_pool(_connections(url, seconds))
        self.seconds = seconds
        self._questions, self._transfers = asyncio.Semaphore(_QUESTIONS), asyncio.Semaphore(_TRANSFERS)
        self.breaker = breaker or Breaker()
        self.counts: Counter[str] = Counter()

    async def close(self) -> None:
        """Closes every connection."""
        await self._server.aclose()

    async def ask(self, work: Callable[[Any], Awaitable[T]]) -> T | None:
        """The result of `work` with the server, or None if the server is left alone, fails, or takes too long."""
        return await self._serve(self._questions, lambda server, _: work(server), self.seconds)

    async def transfer(self, work: Callable[[Any, Progressed], Awaitable[T]], size: int) -> T | None:
        """As `ask`, for `size` bytes in parts: `work` passes each answer through the function it gets, which restarts
        the time limit. The time for all parts grows with the bytes. After the first answer the server is not blamed for
        failures, so the first question should be small."""
        return await self._serve(self._transfers, work, self.seconds + size / _SLOWEST)

    async def _serve(
        self, turns: asyncio.Semaphore, work: Callable[[Any, Progressed], Awaitable[T]], longest: float
    ) -> T | None:
        if not self.breaker.allows():
            return None
        answer = await self._in_turn(turns, work, longest)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # while it disconnects, the library can lose a cancellation
            raise asyncio.CancelledError
        return answer

    async def _in_turn(
        self, turns: asyncio.Semaphore, work: Callable[[Any, Progressed], Awaitable[T]], longest: float
    ) -> T | None:
        try:
            async with asyncio.timeout(self.seconds):
                await turns.acquire()
        except TimeoutError as error:  # our own calls are in the way, not the server
            self.breaker.abandoned()
            self._note(error)
            return None
        except BaseException:
            self.breaker.abandoned()
            raise
        try:
            return await self._bounded(work, longest)
        finally:
            turns.release()

    async def _bounded(self, work: Callable[[Any, Progressed], Awaitable[T]], longest: float) -> T | None:
        now = asyncio.get_running_loop().time
        end, answered = now() + longest, False
        limit = asyncio.timeout(self.seconds)

        def progressed(answer: Any) -> Any:
            nonlocal answered
            if not answered:
                answered = True
                self.breaker.succeeded()
            if not limit.expired():
                limit.reschedule(min(now() + self.seconds, end))
            return answer

        try:
            async with limit:
                answer = await work(self._server, progressed)
        except ResponseError as error:  # it refuses: full, read-only, or another type under the key
            self.breaker.succeeded()
            self._note(error)
        except Exception as error:  # noqa: BLE001 - what is no protocol breaks the library in many ways
            if not answered:
                self.breaker.failed()
            self._note(error)
        except BaseException:
            if not answered:
                self.breaker.abandoned()
            raise
        else:
            self.breaker.succeeded()
            return answer
        return None

    def _note(self, error: Exception) -> None:
        self.counts["errors"] += 1
        _log.warning("the shared store failed", cause=type(error).__name__, left_alone=self.breaker.is_open)
