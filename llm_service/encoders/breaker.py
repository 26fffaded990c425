"""Keeps failures from spreading: a circuit breaker for each encoder, a retry budget, and a quarantine for poisonous
items.

All use a clock that tests can set; none of them waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

_TOLERATED = 2
"""Consecutive incidents after which an encoder that answers is still used."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0

_RETRY_SHARE = 0.2
_RESERVE = 64.0
"""Retries."""

DEATHS = 2
"""Encoders that died over an item, after which it is refused."""
_QUARANTINE = 60.0
_REMEMBERED = 1024


class Breaker:
    """Keeps items from an encoder whose streams break although it answers.

    Streams that were open together and break together are one incident. The pause grows with every consecutive
    incident, up to four seconds; a stream that ends well resets the count.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.failures = 0
        self._clock = clock
        self._last = 0.0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Whether items may go there."""
        return self._clock() >= self._until

    def now(self) -> float:
        """The time to remember when a stream is opened."""
        return self._clock()

    def failed(self, opened: float) -> None:
        """A stream that was opened at this time broke."""
        if self.failures and opened < self._last:
            return
        self.failures += 1
        self._last = self._clock()
        if self.failures > _TOLERATED:
            pause = _FIRST_PAUSE * 2 ** (self.failures - _TOLERATED - 1)
            self._until = self._last + min(pause, _LONGEST_PAUSE)

    def succeeded(self) -> None:
        """A stream ended well."""
        self.failures = 0
        self._until = 0.0


class RetryBudget:
    """At most one retry for five items, beyond a `reserve` that is always available: when everything fails, retries
    must not make it worse. Items of an encoder that is gone may always go to another one."""

    def __init__(self, reserve: float = _RESERVE) -> None:
        self._reserve = reserve
        self._tokens = reserve

    def earn(self) -> None:
        """An item was asked for the first time."""
        self._tokens = min(self._reserve, self._tokens + _RETRY_SHARE)

    def spend(self) -> bool:
        """Takes one retry; False if there is none left."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """A retry that was taken came to nothing: the encoder was full."""
        self._tokens = min(self._reserve, self._tokens + 1)


@dataclass(slots=True)
class _Record:
    deaths: int
    until: float


class Quarantine:
    """Items over which encoders died, together with their connection, too often: refused for a minute without being
    tried.

    If only an encoder's worker processes die over an item, the encoder itself finds out and refuses it.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def blame(self, affinity: bytes) -> None:
        """An encoder that had begun on this item is gone."""
        deaths = self.deaths(affinity) + 1
        self._records.pop(affinity, None)
        self._records[affinity] = _Record(deaths, self._clock() + _QUARANTINE)
        while len(self._records) > _REMEMBERED:
            self._records.popitem(last=False)

    def clear(self, affinity: bytes) -> None:
        """An encoder has done this item."""
        self._records.pop(affinity, None)

    def deaths(self, affinity: bytes) -> int:
        """How many encoders have died over it lately, perhaps by chance."""
        record = self._records.get(affinity)
        return record.deaths if record is not None and record.until > self._clock() else 0

    def is_quarantined(self, affinity: bytes) -> bool:
        """Whether the item is refused."""
        return self.deaths(affinity) >= DEATHS
