"""One Redis or Valkey server as a cache: every answer comes within a bound, or counts as a miss. Nothing here raises
because of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import valkey.asyncio as valkey
from valkey.exceptions import ResponseError

from common import log

_SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")

_CONNECTIONS = 16
_FAILURES = 3
"""Failures in a row after which the server is left alone for a while."""

_SHORTEST_REST, _LONGEST_REST = 0.5, 30.0

T = TypeVar("T")

_log = log.get("shared store")


class Breaker:
    """Leaves a server alone that fails again and again; after a rest, one call tries how it is."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures = 0
        self._rest = _SHORTEST_REST
        self._until = 0.0
        self._trying = False

    def allows(self) -> bool:
        """The server may be asked; where it has been failing, only one caller at a time may."""
        if self._failures < _FAILURES:
            return True
        if self._trying or self._now() < self._until:
            return False
        self._trying = True
        return True

    @property
    def is_open(self) -> bool:
        """The server is being left alone."""
        return self._failures >= _FAILURES

    def succeeded(self) -> None:
        """The server answered."""
        self._failures, self._rest, self._trying = 0, _SHORTEST_REST, False

    def failed(self) -> None:
        """The server did not answer, or too late. Calls that were under way when it was given up say nothing new."""
        self._failures += 1
        if self._failures == _FAILURES or self._trying:
            self._until = self._now() + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        self._trying = False

    def abandoned(self) -> None:
        """The call was given up by its caller; it says nothing of the server."""
        self._trying = False


def check_url(url: str) -> None:
    """Raises ValueError, which does not show the password, for an address that no connection can be made from."""
    if not url.startswith(_SCHEMES):
        raise ValueError(f"the address must begin with one of {' '.join(_SCHEMES)}")
    try:
        pool = _connections(url, 1.0)
        pool.connection_class(**pool.connection_kwargs)  # which connects nowhere yet
    except (ValueError, TypeError):
        raise ValueError("the address cannot be read, or holds an option that there is not") from None


def _connections(url: str, seconds: float) -> valkey.BlockingConnectionPool:
    return valkey.BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=seconds,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        retry=None,
    )


class TierClient:
    """A pool of connections to one server, behind a breaker. `close` is its owner's.

    `url` may hold user, password, database and TLS settings. `counts` are totals since start.
    """

    def __init__(self, url: str, *, seconds: float, breaker: Breaker | None = None) -> None:
        self._server = valkey.Valkey.from_pool(_connections(url, seconds))
        self._seconds = seconds
        self.breaker = breaker or Breaker()
        self.counts: Counter[str] = Counter()

    async def close(self) -> None:
        """Closes every connection."""
        await self._server.aclose()

    async def ask(self, work: Callable[[Any], Awaitable[T]], *, seconds: float | None = None) -> T | None:
        """What `work` gets from the server, or None where the server is left alone, fails, or takes too long."""
        if not self.breaker.allows():
            return None
        answer = await self._bounded(work, seconds or self._seconds)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # while it disconnects, the library can lose a cancellation
            raise asyncio.CancelledError
        return answer

    async def _bounded(self, work: Callable[[Any], Awaitable[T]], seconds: float) -> T | None:
        try:
            async with asyncio.timeout(seconds):
                answer = await work(self._server)
        except ResponseError as error:  # it is there, and will not do this: full, read-only, another type under the key
            self.breaker.succeeded()
            self._note(error)
        except Exception as error:  # noqa: BLE001 - what is no protocol breaks the library in many ways
            self.breaker.failed()
            self._note(error)
        except BaseException:
            self.breaker.abandoned()
            raise
        else:
            self.breaker.succeeded()
            return answer
        return None

    def _note(self, error: Exception) -> None:
        self.counts["errors"] += 1
        _log.warning("the shared store failed", why=type(error).__name__, left_alone=self.breaker.is_open)
