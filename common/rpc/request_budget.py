"""Incoming requests, under one budget of bytes over all calls; docs/design/request.md has the rules.

A message counts from its first byte until its call ends, and twice while it arrives: gRPC holds what has arrived, and
hands it over as a copy. Callers behind one connection, such as a proxy's, count as one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Protocol

from common.aio import tasks
from common.errors import Exhausted, TwinlensError
from common.process.malloc import give_back
from common.rpc.tcp_connections import Address, TcpConnections, remote_address
from common.telemetry import log

SMALL = 1 << 20
"""Bytes of a message that may use all of the budget."""

STATED = "twinlens-request-bytes"
"""The metadata in which a caller may state its message's size."""

UNREAD = 64 << 10
"""Bytes of a message that gRPC reads before it is asked to: a stream's window. Every message counts as at least
that."""

_FILLED = 48 << 10
"""Bytes from which a window counts as full."""

_COPIES = 2
"""Of a message that is just being handed over."""

_LARGE = 8 << 20
"""Bytes of a message after which free memory is returned to the system."""

_LOOK_SECONDS, _PACE_SECONDS = 0.02, 0.25
"""Intervals of checking what has arrived, and of measuring the pace."""

_LATE_SECONDS = 0.05
"""By how much a look is late in a process that stood still."""

_CLAIM_SECONDS = 1.0
"""How long a message that filled its window is taken for the largest."""

_SOON_SECONDS, _TIDY_SECONDS = 0.01, (2.0, 8.0)
"""Delays before free memory is returned to the system: after a large message, and after as many bytes of small ones."""

_MAX_REMEMBERED = 1 << 14
"""Connections whose received bytes are remembered."""

_log = log.get("request_budget")


class Ends(Protocol):
    """What can be ended with an error: a call."""

    def end(self, error: TwinlensError) -> None:
        """Has its caller told."""


class Arriving:
    """One incoming message. It has a `claim` to so many bytes; one that filled its window has the largest claim, for a
    while."""

    def __init__(self, call: Ends, claim: int, since: int, *, lasting: bool) -> None:
        self.call = call
        self.since = since
        self.begun = time.monotonic()
        self._claim = claim
        self._lasting = lasting

    def claim(self, now: float) -> int:
        """What it may bring, as far as known."""
        return self._claim if self._lasting or now - self.begun < _CLAIM_SECONDS else UNREAD


class _Connection:
    """The incoming messages of one connection, the oldest first. `base` of the bytes that it has `received` are
    accounted for; `moved` is when it last received a significant amount, `pace` its bytes per second."""

    def __init__(self, far: Address | None, received: int | None) -> None:
        self.far = far
        self.measured = received is not None
        self.received = self.base = received or 0
        self.moved = self._timed = time.monotonic()
        self.pace = 0.0
        self._mark = self._counted = self.received
        self.arriving: list[Arriving] = []

    @property
    def came(self) -> int:
        """Bytes of them that are here, at most."""
        return self.received - self.base

    def claims(self, now: float) -> int:
        """The sum of its messages' claims."""
        return sum(each.claim(now) for each in self.arriving)

    def bytes(self, now: float, max_message_bytes: int, foreseen_seconds: float) -> int:
        """The bytes of its messages, each at most `max_message_bytes`, including those expected within a moment."""
        came = self.came
        foreseen = min(came + round(self.pace * foreseen_seconds), len(self.arriving) * max_message_bytes)
        return max(self.claims(now), came, foreseen if came > UNREAD else 0)

    def excuse(self, seconds: float, now: float) -> None:
        """This process has read nothing for so long, so nobody counts as slow for that time."""
        self.moved = min(now, self.moved + seconds)
        for one in self.arriving:
            one.begun = min(now, one.begun + seconds)

    def note(self, received: int, now: float) -> None:
        """So much has come by now."""
        self.received = received
        if received - self._mark >= UNREAD:
            self._mark, self.moved = received, now
        if (taken := now - self._timed) >= _LOOK_SECONDS / 2:
            latest = (received - self._counted) / taken
            part = min(1.0, taken / _PACE_SECONDS)
            self.pace = max(latest * part + self.pace * (1 - part), 0.0)
            self._timed, self._counted = now, received

    def close(self, one: Arriving, size: int) -> None:
        """A message of `size` bytes has arrived. Bytes before the next one began belonged to it."""
        oldest = self.arriving[0] is one
        self.arriving.remove(one)
        self.base += size
        if oldest and self.arriving:
            self.base = max(self.base, self.arriving[0].since)


_WaitQueue = deque[tuple[int, asyncio.Future[None]]]
"""Waiters for room, with the bytes they want."""


class RequestBudget:
    """The budget of `max_bytes`, for messages of at most `max_message_bytes`. Messages wait at most `wait_seconds` for
    room; one without progress for `still_seconds` gives way; bytes expected within `foreseen_seconds` count as arrived,
    since a busy process checks no sooner. `received` returns what a connection has received. To be used on one event
    loop."""

    def __init__(
        self,
        max_bytes: int,
        max_message_bytes: int,
        *,
        stall_seconds: float = 10.0,
        still_seconds: float = 1.0,
        wait_seconds: float = 2.0,
        foreseen_seconds: float = 0.25,
        received: Callable[[Address], int | None] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_large = _COPIES * max_large_bytes(max_bytes)
        self._max_message_bytes = max_message_bytes
        self._stall_seconds = stall_seconds
        self._still_seconds = still_seconds
        self._wait_seconds = wait_seconds
        self._foreseen_seconds = foreseen_seconds
        self._received = received or TcpConnections().received
        self._connections: dict[str, _Connection] = {}
        self._brought: OrderedDict[str, int] = OrderedDict()
        self._queues: tuple[tuple[_WaitQueue, int], ...] = ((deque(), self._max_bytes), (deque(), self._max_large))
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._gone = 0
        self._tidying: dict[float, asyncio.TimerHandle] = {}
        self._trimming: Future[bool] | None = None
        self.held = 0
        """Bytes of messages that are here."""

    @property
    def arriving(self) -> int:
        """Bytes counted for incoming messages, including those that wait for their turn."""
        now = time.monotonic()
        coming = sum(self._bytes(connection, now) for connection in self._connections.values())
        return _COPIES * coming + self._waiting * UNREAD

    def _bytes(self, connection: _Connection, now: float) -> int:
        return connection.bytes(now, self._max_message_bytes, self._foreseen_seconds)

    @property
    def _waiting(self) -> int:
        return sum(len(queue) for queue, _ in self._queues)

    @asynccontextmanager
    async def arrival(self, peer: str, call: Ends, stated: int = 0) -> AsyncIterator[Callable[[int], None]]:
        """Counts a message that is read inside the context, until it has arrived; the context reports its size, and
        from then on it is `held`. Waits for room; raises Exhausted if there is none."""
        connection = self._connection(peer)
        lasting = stated > 0 or not connection.measured
        claim = (
            min(stated, self._max_message_bytes) if stated and connection.measured else self._unstated(peer, connection)
        )
        if await self._room(max(claim, UNREAD)):  # the connection may have others by now, and have brought more
            connection = self._connection(peer)
        self._connections[peer] = connection
        one = Arriving(call, max(claim, UNREAD), connection.received, lasting=lasting)
        connection.arriving.append(one)
        self._watch()
        size = 0

        def arrived(length: int) -> None:
            nonlocal size
            size = length
            self.held += length

        try:
            yield arrived
        finally:
            if one in connection.arriving:  # else it had to give way
                connection.close(one, size)
                self._forget(peer, connection)
            self._serve()
            self._churn(size)

    def release(self, size: int) -> None:
        """A call that has held so much is over."""
        self.held -= size
        self._serve()
        self._churn(size)

    def _connection(self, peer: str) -> _Connection:
        connection = self._connections.get(peer)
        if connection is None:
            far = remote_address(peer)
            return _Connection(far, self._received(far) if far else None)
        self._measure(connection, time.monotonic())
        return connection

    def _measure(self, connection: _Connection, now: float) -> None:
        received = self._received(connection.far) if connection.far else None
        if received is not None and connection.measured:
            connection.note(received, now)

    def _unstated(self, peer: str, connection: _Connection) -> int:
        """The most that a message of unstated size may bring: the maximum, if it has filled its window. If others
        arrive on the same connection, nobody can tell which has filled what."""
        if not connection.measured:
            return self._max_message_bytes
        filled = not connection.arriving and connection.received - self._brought.get(peer, 0) >= _FILLED
        return self._max_message_bytes if filled else UNREAD

    async def _room(self, wanted: int) -> bool:
        """Returns when so much has room, and whether that was waited for. Small messages have a queue of their own.
        Raises Exhausted after a while."""
        queue, limit = self._queues[wanted > SMALL]
        if not queue and self._makes_room(wanted, limit):
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((wanted, turn))
        self._watch()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except TimeoutError:
            raise _full() from None
        finally:
            queue.remove((wanted, turn))
        return True

    def _serve(self) -> None:
        """Admits the first of each queue if there is room; the next one once that counts."""
        for queue, limit in self._queues:
            if queue and not queue[0][1].done() and self._makes_room(queue[0][0], limit):
                queue[0][1].set_result(None)

    def _makes_room(self, wanted: int, limit: int) -> bool:
        """Whether there is room for so much once all that have more, and no claim to it, have given way."""
        while self.held + self.arriving + _COPIES * wanted > limit:
            if not self._one_gives_way(more_than=max(wanted, SMALL)):
                return False
        return True

    def _one_gives_way(self, more_than: int) -> bool:
        """The largest one without progress, if it is large enough; else the one most beyond its claims."""
        now = time.monotonic()
        connections = self._connections.items()
        still = {peer: self._bytes(each, now) for peer, each in connections if now - each.moved > self._still_seconds}
        excess = {peer: each.came - each.claims(now) for peer, each in connections}
        for sizes, threshold in ((still, SMALL), (excess, more_than)):
            peer = max(sizes, key=lambda each: sizes[each], default="")
            if sizes.get(peer, 0) > threshold:
                self._end(peer, self._connections[peer], _full())
                return True
        return False

    def _end(self, peer: str, connection: _Connection, error: TwinlensError) -> None:
        """Ends everything arriving on a connection, since nobody can tell whose bytes are whose."""
        arriving, connection.arriving = connection.arriving, []
        came = connection.came
        _log.warning(
            "calls are refused: too many bytes at once", reason=error.reason, peer=peer, calls=len(arriving), bytes=came
        )
        self._forget(peer, connection)
        self._churn(came)
        for one in arriving:
            one.call.end(error)

    def _forget(self, peer: str, connection: _Connection) -> None:
        if not connection.arriving and self._connections.get(peer) is connection:
            del self._connections[peer]
            self._brought[peer] = max(connection.received, connection.base)
            self._brought.move_to_end(peer)
            if len(self._brought) > _MAX_REMEMBERED:
                self._brought.popitem(last=False)

    def _watch(self) -> None:
        if self._timer is None and (self._connections or self._waiting):
            self._due = time.monotonic() + _LOOK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Fifty times a second while anything arrives: checks what has arrived, what is stuck, and what must give
        way."""
        self._timer = None
        now = time.monotonic()
        late = now - self._due
        for peer, connection in list(self._connections.items()):
            if late > _LATE_SECONDS:
                connection.excuse(late, now)
            self._measure(connection, now)
            if now - max(connection.moved, connection.arriving[0].begun) > self._stall_seconds:
                self._end(peer, connection, Exhausted("the request did not arrive in time", reason="REQUEST_TOO_SLOW"))
            elif connection.came > len(connection.arriving) * (self._max_message_bytes + self._max_message_bytes // 8):
                self._end(peer, connection, _full())  # tiny frames cost many times their content
        for limit, more_than in ((self._max_large, SMALL), (self._max_bytes, 0)):
            while self.held + self.arriving > limit and self._one_gives_way(more_than):
                pass
        self._serve()
        self._watch()

    def _churn(self, size: int) -> None:
        """So many bytes have been freed, or will be: gRPC's copy, or what was made of it."""
        self._gone += size
        if size >= _LARGE:
            self._tidy_in(_SOON_SECONDS)
        if self._gone >= _LARGE:
            self._gone = 0
            for seconds in _TIDY_SECONDS:
                self._tidy_in(seconds)

    def _tidy_in(self, seconds: float) -> None:
        if seconds not in self._tidying:
            self._tidying[seconds] = asyncio.get_running_loop().call_later(seconds, self._tidy, seconds)

    def _tidy(self, seconds: float) -> None:
        """Returns free memory to the system, in a thread, since it takes time: otherwise gRPC's copies of messages
        stay. Repeated after a while, when others have released theirs."""
        del self._tidying[seconds]
        if self._trimming is not None and not self._trimming.done():
            self._tidy_in(seconds)
            return
        self._trimming = tasks.in_daemon_thread(give_back)


def max_large_bytes(budget: int) -> int:
    """The largest message that a budget of bytes lets in."""
    return (budget - budget // 8) // _COPIES


def _full() -> Exhausted:
    return Exhausted("requests hold too many bytes", reason="TOO_MANY_BYTES")
