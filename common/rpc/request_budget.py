"""Requests on their way in, under one budget of bytes over all calls: docs/design/request.md has the rules.

A message counts from its first byte until its call ends, and twice while it comes: gRPC holds what has come, and hands
it over as a copy. Callers behind one connection, such as a proxy's, are one caller here.
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
"""The metadata in which a caller may say how large its message is."""

UNREAD = 64 << 10
"""Bytes of a message that gRPC takes before it is asked for: a stream's window. Every message counts as so many."""

_FILLED = 48 << 10
"""Bytes with which a window counts as full."""

_COPIES = 2
"""Of a message that is just being handed over."""

_LARGE = 8 << 20
"""Bytes of a message after which what is free goes back to the system."""

_LOOK_SECONDS, _PACE_SECONDS = 0.02, 0.25
"""How often is looked at what has come, and over what time a pace is taken."""

_LATE_SECONDS = 0.05
"""By how much a look is late in a process that stood still."""

_CLAIM_SECONDS = 1.0
"""How long a message that filled its window is taken for the largest."""

_SOON_SECONDS, _TIDY_SECONDS = 0.01, (2.0, 8.0)
"""How long after a large message, and after as many bytes of small ones, what is free goes back to the system."""

_MAX_REMEMBERED = 1 << 14
"""Connections of which it is remembered what they have brought."""

_log = log.get("request_budget")


class Ends(Protocol):
    """What can be ended with an error: a call."""

    def end(self, error: TwinlensError) -> None:
        """Has its caller told."""


class Arriving:
    """One message on its way in. It has a `claim` to so many bytes; one that filled its window has that to the largest,
    for a while."""

    def __init__(self, call: Ends, claim: int, since: int, *, lasting: bool) -> None:
        self.call = call
        self.since = since
        self.begun = time.monotonic()
        self._claim = claim
        self._lasting = lasting

    def claim(self, now: float) -> int:
        """What it may bring as far as is known."""
        return self._claim if self._lasting or now - self.begun < _CLAIM_SECONDS else UNREAD


class _Connection:
    """What is coming over one connection, the oldest first. `base` of the bytes that it has `received` are accounted
    for; `moved` is when it last brought anything worth mentioning, `pace` what it brings, in bytes a second."""

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
        """What its messages have a claim to."""
        return sum(each.claim(now) for each in self.arriving)

    def bytes(self, now: float, max_message_bytes: int, foreseen_seconds: float) -> int:
        """What its messages amount to, of up to `max_message_bytes` each; what comes in a moment included."""
        came = self.came
        foreseen = min(came + round(self.pace * foreseen_seconds), len(self.arriving) * max_message_bytes)
        return max(self.claims(now), came, foreseen if came > UNREAD else 0)

    def excuse(self, seconds: float, now: float) -> None:
        """For so long this process read nothing: nobody is slow by that."""
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
        """A message of `size` bytes is no longer coming. What came before the next one began was not that one's."""
        oldest = self.arriving[0] is one
        self.arriving.remove(one)
        self.base += size
        if oldest and self.arriving:
            self.base = max(self.base, self.arriving[0].since)


_WaitQueue = deque[tuple[int, asyncio.Future[None]]]
"""Who waits for room, with how much is wanted."""


class RequestBudget:
    """The budget: `max_bytes`, of which messages of up to `max_message_bytes` come. Who waits for room does so for
    `wait_seconds`; who has brought nothing for `still_seconds` gives way; what comes within `foreseen_seconds` counts
    as if it were here, since a busy process looks no sooner. `received` says what a connection has brought. It is used
    on one event loop."""

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
        """Bytes that messages on their way in count as, those that wait for their turn included."""
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
        """Counts a message that is asked for inside the block, until that ends; the block says how large it was, and
        from then on it is `held`. Waits for room; raises Exhausted where there is none for it."""
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
        """What a message may bring of which nothing is said: the largest, where it has filled its window already. Where
        others come over the same connection, nobody can say who has filled what."""
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
        """Lets the first in each queue in, where there is room; the next one when that counts."""
        for queue, limit in self._queues:
            if queue and not queue[0][1].done() and self._makes_room(queue[0][0], limit):
                queue[0][1].set_result(None)

    def _makes_room(self, wanted: int, limit: int) -> bool:
        """Whether so much has room, where all have given way who have more and no claim to it."""
        while self.held + self.arriving + _COPIES * wanted > limit:
            if not self._one_gives_way(more_than=max(wanted, SMALL)):
                return False
        return True

    def _one_gives_way(self, more_than: int) -> bool:
        """The largest that stands still, if it is worth it; else who has the most beyond its claims."""
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
        """Ends all that is coming over a connection: nobody can say which of it is whose."""
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
        """Fifty times a second, while anything is coming: what has come, what stands still, and who has to give way."""
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
                self._end(peer, connection, _full())  # frames of next to nothing: they cost many times what is in them
        for limit, more_than in ((self._max_large, SMALL), (self._max_bytes, 0)):
            while self.held + self.arriving > limit and self._one_gives_way(more_than):
                pass
        self._serve()
        self._watch()

    def _churn(self, size: int) -> None:
        """So many bytes have been freed, or are going to be: of what gRPC had, or of what was made of it."""
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
        """Gives what is free back to the system, beside the event loop, since it takes its time: else what gRPC had of
        a message stays. Again after a while, when others have let go of what they had of it too."""
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
