"""Requests on their way in, under one budget of bytes over all calls.

A message counts from its first byte until its call ends. While it comes, gRPC holds what has come, and what that is is
measured: the bytes that its connection has received since the oldest message that is still coming was asked for
(`received`). A caller may say how large a message is; then so much is set aside before it comes, and where there is no
room it is refused before it costs anything. Nobody is believed who sends more than he said.

Where the budget is spent, those give way whose connection stands still, then those who have sent the most beyond what
they said; a message that is all here is safe. An eighth of the budget is for small messages alone, so that whoever
fills the rest stops nobody who asks a short question or shows a small picture. What brings next to nothing for
`stall_seconds` is given up. Callers behind one connection, such as a proxy's, are one caller here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from common import log, tasks
from common.allocator import give_back
from common.errors import Exhausted, TwinlensError
from common.received import Address, Sockets, far_end

SMALL = 1 << 20
"""Bytes of a message that may use all of the budget."""

STATED = "twinlens-request-bytes"
"""The metadata in which a caller may say how large its message is."""

UNREAD = 64 << 10
"""Bytes of a message that gRPC takes before it is asked for: a stream's window. Every message counts as so many."""

_LOOK_SECONDS = 0.02
_STILL_SECONDS = 1.0
"""What has stood still for so long gives way to others."""

_TIDY_BYTES, _TIDY_SECONDS = 32 << 20, 2.0
"""After so many bytes have come and gone, and as much time, what is free goes back to the system."""

_log = log.get("intake")


class Ends(Protocol):
    """What can be ended with an error: a call."""

    def end(self, error: TwinlensError) -> None:
        """Has its caller told."""


class Arriving:
    """One message on its way in. `stated` is its size as far as it is known, and counts from the beginning."""

    def __init__(self, call: Ends, connection: _Connection, stated: int) -> None:
        self.call = call
        self.connection = connection
        self.stated = max(stated, UNREAD)
        self.since = connection.received
        self.begun = time.monotonic()


class _Connection:
    """What is coming over one connection, the oldest first. `base` of the bytes that it has `received` are accounted
    for; `moved` is when it last brought anything worth mentioning."""

    def __init__(self, far: Address | None, received: int | None) -> None:
        self.far = far
        self.measured = received is not None
        self.received = self.base = self.mark = received or 0
        self.moved = time.monotonic()
        self.arriving: list[Arriving] = []

    @property
    def stated(self) -> int:
        return sum(each.stated for each in self.arriving)

    @property
    def bytes(self) -> int:
        """What its messages count as."""
        return max(self.stated, self.received - self.base)

    def excess(self, now: float) -> int:
        """What it would have to give way with."""
        return self.bytes if now - self.moved > _STILL_SECONDS else self.bytes - self.stated

    def note(self, received: int, now: float) -> None:
        """So much has come by now."""
        self.received = received
        if received - self.mark >= UNREAD:
            self.mark, self.moved = received, now

    def close(self, one: Arriving, size: int) -> None:
        """A message of `size` bytes is no longer coming. What came before the next one began was not that one's."""
        oldest = self.arriving[0] is one
        self.arriving.remove(one)
        self.base += size
        if oldest and self.arriving:
            self.base = max(self.base, self.arriving[0].since)


class Intake:
    """The budget: `most` bytes, of which messages of up to `largest` come. `received` says what a connection has
    brought. It is used on one event loop."""

    def __init__(
        self,
        most: int,
        largest: int,
        *,
        stall_seconds: float = 10.0,
        received: Callable[[Address], int | None] | None = None,
    ) -> None:
        self._most = most
        self._largest = largest
        self._stall_seconds = stall_seconds
        self._received = received or Sockets().received
        self._connections: dict[str, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._gone = 0
        self._tidying: asyncio.TimerHandle | None = None
        self.held = 0
        """Bytes of messages that are here."""

    @property
    def arriving(self) -> int:
        """Bytes that messages on their way in count as."""
        return sum(connection.bytes for connection in self._connections.values())

    @contextmanager
    def arrival(self, peer: str, call: Ends, stated: int = 0) -> Iterator[Callable[[int], None]]:
        """Counts a message that is about to be asked for, until the block ends; the block says how large it was, and
        from then on it is `held`. Raises Exhausted where there is no room for it."""
        connection = self._connection(peer)
        one = Arriving(call, connection, min(stated, self._largest) if connection.measured else self._largest)
        self._make_room(one.stated)
        self._connections[peer] = connection
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
            self._churn(size)

    def let_go(self, size: int) -> None:
        """So much of what was held is needed no more."""
        self.held -= size
        self._churn(size)

    def _connection(self, peer: str) -> _Connection:
        connection = self._connections.get(peer)
        if connection is None:
            far = far_end(peer)
            return _Connection(far, self._received(far) if far else None)
        self._measure(connection, time.monotonic())
        return connection

    def _measure(self, connection: _Connection, now: float) -> None:
        received = self._received(connection.far) if connection.far else None
        if received is not None and connection.measured:
            connection.note(received, now)

    def _make_room(self, wanted: int) -> None:
        """Raises Exhausted where so much has no room, though all have given way who have more and have no claim."""
        most = self._most if wanted <= SMALL else self._most - self._most // 8
        while self.held + self.arriving + wanted > most:
            if not self._one_gives_way(more_than=max(wanted, SMALL)):
                raise _full()

    def _one_gives_way(self, more_than: int) -> bool:
        now = time.monotonic()
        largest = max(self._connections.items(), key=lambda each: each[1].excess(now), default=None)
        if largest is None or largest[1].excess(now) <= more_than:
            return False
        self._end(*largest, _full())
        return True

    def _end(self, peer: str, connection: _Connection, error: TwinlensError) -> None:
        """Ends all that is coming over a connection: nobody can say which of it is whose."""
        arriving, connection.arriving = connection.arriving, []
        _log.warning("refused", reason=error.reason, peer=peer, calls=len(arriving), bytes=connection.bytes)
        self._churn(connection.received - connection.base)
        self._forget(peer, connection)
        for one in arriving:
            one.call.end(error)

    def _forget(self, peer: str, connection: _Connection) -> None:
        if not connection.arriving and self._connections.get(peer) is connection:
            del self._connections[peer]

    def _watch(self) -> None:
        if self._timer is None and self._connections:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Fifty times a second, while anything is coming: what has come, what stands still, and who has to give way."""
        self._timer = None
        now = time.monotonic()
        for peer, connection in list(self._connections.items()):
            self._measure(connection, now)
            if now - max(connection.moved, connection.arriving[0].begun) > self._stall_seconds:
                self._end(peer, connection, Exhausted("the request did not arrive in time", reason="REQUEST_TOO_SLOW"))
            elif connection.bytes > len(connection.arriving) * (self._largest + self._largest // 8):
                self._end(peer, connection, _full())  # frames of next to nothing: they cost many times what is in them
        while self.held + self.arriving > self._most and self._one_gives_way(more_than=0):
            pass
        self._watch()

    def _churn(self, size: int) -> None:
        self._gone += size
        if self._gone >= _TIDY_BYTES and self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(_TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        """Gives memory that such messages have left back to the system, beside the event loop: it takes its time."""
        self._gone, self._tidying = 0, None
        tasks.in_daemon(give_back)


def _full() -> Exhausted:
    return Exhausted("too many bytes of requests are on their way", reason="TOO_MANY_BYTES")
