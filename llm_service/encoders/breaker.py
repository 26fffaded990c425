"""What keeps failures from spreading: a breaker for each encoder, a budget of retries, and a list of poisonous items.

All three count with a clock that tests can set; none of them waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

_TOLERATED = 2
"""Incidents in a row after which an encoder that answers is still asked."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0

_RETRY_SHARE = 0.2
_RESERVE = 64.0
"""Retries."""

DEATHS = 2
"""Encoders that died over an item, after which it is refused."""
_QUARANTINE = 60.0
_REMEMBERED = 1024


class Breaker:
    """Keeps items from an encoder whose streams break though it answers.

    Streams that were under way together and break together are one incident. A pause grows with every further incident
    in a row, to four seconds at most; a stream that ends well begins the count anew.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.failures = 0
        self._clock = clock
        self._last = 0.0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Items may go there."""
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
    """At most one retry for five items, beyond a `reserve` that is always there to be had: when everything fails,
    retries must not make it worse. Those who were with an encoder that is gone may go to another one all the same."""

    def __init__(self, reserve: float = _RESERVE) -> None:
        self._reserve = reserve
        self._tokens = reserve

    def earn(self) -> None:
        """An item was asked for the first time."""
        self._tokens = min(self._reserve, self._tokens + _RETRY_SHARE)

    def spend(self) -> bool:
        """Takes one retry; False where there is none left."""
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
    """Items over which encoders died, connection and all, once too often: refused for a minute without being tried.

    The worker processes of an encoder die over an item without this: that, the encoder itself finds out and refuses.
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
        """Whether the item is to be refused."""
        return self.deaths(affinity) >= DEATHS
