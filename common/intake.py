"""Requests on their way in, under one budget of bytes over all calls.

A message counts from its first byte until its call ends, and twice while it comes: gRPC holds what has come, and hands
it over as a copy. How much has come is measured: the bytes that its connection has received since the oldest message
that is still coming was asked for (`received`). A caller may say how large a message is; then so much is set aside
before it comes, and where there is no room it is refused before it costs anything. Nobody is believed who sends more.

Where the budget is spent, those give way whose connection stands still, then those who have sent the most beyond what
they said; a message that is all here is safe. An eighth of the budget is for small messages alone, so that whoever
fills the rest stops nobody who asks a short question or shows a small picture. What brings next to nothing for
`stall_seconds` is given up. Callers behind one connection, such as a proxy's, are one caller here.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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

_COPIES = 2
"""Of a message that is just being handed over."""

_LARGE = 8 << 20
"""Bytes of a message after which garbage is looked for; what was loaded before the service began is left out of that
(`allocator.settle`)."""

_LOOK_SECONDS = 0.02
_SOON_SECONDS, _TIDY_SECONDS = 0.01, (2.0, 8.0)
"""How long after a large message, and after as many bytes of small ones, what is free goes back to the system."""

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
        """What its messages amount to."""
        return max(self.stated, self.received - self.base)

    def excess(self, still_since: float) -> int:
        """What of that it would have to give way with; all, where it has brought nothing since then."""
        return self.bytes if self.moved <= still_since else self.bytes - self.stated

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
    brought; who has brought nothing for `still_seconds` gives way. It is used on one event loop."""

    def __init__(
        self,
        most: int,
        largest: int,
        *,
        stall_seconds: float = 10.0,
        still_seconds: float = 1.0,
        received: Callable[[Address], int | None] | None = None,
    ) -> None:
        self._most = most
        self._most_of_large = _COPIES * most_at_once(most)
        self._largest = largest
        self._stall_seconds = stall_seconds
        self._still_seconds = still_seconds
        self._received = received or Sockets().received
        self._connections: dict[str, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._gone = 0
        self._tidying: dict[float, asyncio.TimerHandle] = {}
        self._trimming: Future[bool] | None = None
        self.held = 0
        """Bytes of messages that are here."""

    @property
    def arriving(self) -> int:
        """Bytes that messages on their way in count as."""
        return _COPIES * sum(connection.bytes for connection in self._connections.values())

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
        """A call that has held so much is over. Where that is much, it counts until it is gone for certain: an error
        that ended the call may be part of a circle, with all that its traceback leads to."""
        if size >= _LARGE:
            asyncio.get_running_loop().call_soon(self._collected, size)
        else:
            self._released(size)

    def _collected(self, size: int) -> None:
        gc.collect()
        self._released(size)

    def _released(self, size: int) -> None:
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
        most = self._most if wanted <= SMALL else self._most_of_large
        while self.held + self.arriving + _COPIES * wanted > most:
            if not self._one_gives_way(more_than=max(wanted, SMALL)):
                raise _full()

    def _one_gives_way(self, more_than: int) -> bool:
        still_since = time.monotonic() - self._still_seconds
        largest = max(self._connections.items(), key=lambda each: each[1].excess(still_since), default=None)
        if largest is None or largest[1].excess(still_since) <= more_than:
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
        for most, more_than in ((self._most_of_large, SMALL), (self._most, 0)):
            while self.held + self.arriving > most and self._one_gives_way(more_than):
                pass
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
        if seconds != _SOON_SECONDS:
            gc.collect()
        self._trimming = tasks.in_daemon(give_back)


def most_at_once(budget: int) -> int:
    """The largest message that a budget of bytes lets in."""
    return (budget - budget // 8) // _COPIES


def _full() -> Exhausted:
    return Exhausted("too many bytes of requests are on their way", reason="TOO_MANY_BYTES")
