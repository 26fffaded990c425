"""How long items take at an encoder, and whether it is passed over because some took far too long there."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

_NEWS = 0.2
"""What the last item counts for beside all before it."""
FAR_LONGER = 4.0
"""An item that has waited so many times as long as it would elsewhere is overdue."""
_IN_TIME = 1 / 8
"""Of the patience: with eight items before it, as an encoder has before it is crowded, one comes within all of it."""
_LONGEST_PAUSE = 8.0
"""From one try to the next, in times of the first one."""


class Pace:
    """Of one encoder, by items that it has computed for us: the longest that it took for a row, usually the first.

    It is `slow` from when an item there was overdue, after `patience` seconds, until one has come in time. Till then it
    is passed over, but for a try after as many seconds, another one after twice as many, and so on. `clock` gives
    seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._seconds = 0.0
        self._patches = 0.0
        self._slow_since: float | None = None
        self._pause = patience
        self._next_try = 0.0

    @property
    def slow(self) -> bool:
        """An item was overdue there, and none has come in time since."""
        return self._slow_since is not None

    @property
    def may_be_tried(self) -> bool:
        """It has been slow for long enough to be sent another item."""
        return self.slow and self._clock() >= self._next_try

    def on_sending(self) -> None:
        """It is sent an item. While it is slow, the next one has to wait."""
        if self.slow:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE * self._patience)
            self._next_try = self._clock() + self._pause

    def is_slow_since(self, opened: float) -> bool:
        """It has turned slow since this time; an item that was sent there before need not wait to be overdue itself."""
        return self._slow_since is not None and opened <= self._slow_since

    def expected(self, patches: int) -> float:
        """Seconds that an item of so many patches takes, by those of late; 0 where there were none."""
        return self._seconds * max(1.0, patches / self._patches) if self._patches else 0.0

    def on_computed(self, seconds: float, patches: int, elsewhere: float) -> bool:
        """An item of so many patches has come, and waited so many seconds for a row, where it might have taken others
        `elsewhere` seconds; returns whether it is slow no longer."""
        share = _NEWS if self._patches else 1.0
        self._seconds += (seconds - self._seconds) * share
        self._patches += (patches - self._patches) * share
        in_time = min(self._patience, max(_IN_TIME * self._patience, FAR_LONGER * elsewhere))
        if not self.slow or seconds > in_time:
            return False
        self._slow_since, self._pause = None, self._patience
        return True

    def on_overdue(self) -> bool:
        """An item there is; returns whether that is news."""
        if self.slow:
            return False
        self._slow_since = self._clock()
        self._next_try = self._slow_since + self._pause
        return True
