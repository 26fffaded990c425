"""Conversations whose cached rows and blocks are evicted later than all others, within bounds."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Session:
    """One conversation; `number` is its name in the engine. `keys` are its media with the bytes of their rows."""

    number: int
    tenant: str
    name: str
    used: float = 0.0
    keys: OrderedDict[bytes, int] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Sessions in all and of one tenant; seconds from a session's last turn to its end; bytes of rows of one tenant."""

    max_sessions: int
    max_per_tenant: int
    seconds: float
    row_bytes_per_tenant: int


class Sessions:
    """All sessions, the least recently used first. They own and reserve nothing; they only tell the encoder cache
    (which asks `is_retained`) and the engine (which gets a session's number with each request, and its end) what to
    evict last. So a session slows nobody down, and a forgotten one only costs its next turn time.

    Beyond a bound of the tenant or of the service, the least recently used session ends.
    """

    def __init__(self, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, Session]] = {}
        self._keepers: dict[bytes, set[Session]] = {}
        self._bytes: Counter[str] = Counter()
        self._ended: list[int] = []
        self._numbers = 0

    def __len__(self) -> int:
        """The number of sessions that have not expired."""
        return sum(map(self._is_alive, self._sessions.values()))

    def use(self, tenant: str, name: str) -> Session:
        """The session of that name, new or renewed, and now the most recently used."""
        self._end_overdue()
        session = self._sessions.get((tenant, name))
        if session is None:
            self._numbers += 1
            session = Session(self._numbers, tenant, name)
            self._sessions[tenant, name] = session
            self._by_tenant.setdefault(tenant, OrderedDict())[name] = session
        session.used = self._clock()
        self._sessions.move_to_end((tenant, name))
        own = self._by_tenant[tenant]
        own.move_to_end(name)
        if len(own) > self._limits.max_per_tenant:
            self._end(next(iter(own.values())))
        if len(self._sessions) > self._limits.max_sessions:
            self._end(next(iter(self._sessions.values())))
        return session

    def retain(self, session: Session, key: bytes, size: int) -> None:
        """Adds the rows of an item, `size` bytes, to a session. If the tenant exceeds its bound, its least recently
        used sessions end."""
        alive = self._sessions.get((session.tenant, session.name)) is session
        if not alive or size > self._limits.row_bytes_per_tenant:
            return
        if key in session.keys:
            session.keys.move_to_end(key)
            return
        session.keys[key] = size
        keepers = self._keepers.setdefault(key, set())
        self._bytes[session.tenant] += 0 if keepers else size
        keepers.add(session)
        while self._bytes[session.tenant] > self._limits.row_bytes_per_tenant:
            oldest = next(each for each in self._by_tenant[session.tenant].values() if each.keys)
            self._let_go(oldest, next(iter(oldest.keys)))

    def is_retained(self, key: bytes) -> bool:
        """Whether some session wants these rows."""
        return any(map(self._is_alive, self._keepers.get(key, ())))

    def take_ended(self) -> list[int]:
        """Ends expired sessions. Returns the numbers of all sessions that ended since the last call."""
        self._end_overdue()
        ended, self._ended = self._ended, []
        return ended

    def _is_alive(self, session: Session) -> bool:
        return session.used > self._clock() - self._limits.seconds

    def _end_overdue(self) -> None:
        while self._sessions and not self._is_alive(oldest := next(iter(self._sessions.values()))):
            self._end(oldest)

    def _end(self, session: Session) -> None:
        del self._sessions[session.tenant, session.name]
        own = self._by_tenant[session.tenant]
        del own[session.name]
        for key in list(session.keys):
            self._let_go(session, key)
        if not own:
            del self._by_tenant[session.tenant]
            self._bytes.pop(session.tenant, None)
        self._ended.append(session.number)

    def _let_go(self, session: Session, key: bytes) -> None:
        size = session.keys.pop(key)
        self._keepers[key].discard(session)
        if not self._keepers[key]:
            del self._keepers[key]
            self._bytes[session.tenant] -= size

    def check_integrity(self) -> None:
        """Raises AssertionError unless every count matches what the sessions hold."""
        sessions = list(self._sessions.values())
        assert sorted(each.number for own in self._by_tenant.values() for each in own.values()) == sorted(
            each.number for each in sessions
        )
        assert {(key, each) for key, keepers in self._keepers.items() for each in keepers} == {
            (key, each) for each in sessions for key in each.keys
        }
        assert all(self._keepers.values())
        for tenant, own in self._by_tenant.items():
            sizes = {key: size for each in own.values() for key, size in each.keys.items()}
            assert self._bytes[tenant] == sum(sizes.values()) <= self._limits.row_bytes_per_tenant
            assert len(own) <= self._limits.max_per_tenant
        assert len(sessions) <= self._limits.max_sessions
