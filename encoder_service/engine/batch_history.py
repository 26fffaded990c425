"""What the dispatcher remembers of batches: totals, how long they take, and which items were there when a worker
died."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

_KEPT = 0.8
"""The share of a figure that remains after the next one: about ten batches are remembered."""
_HUNG = 20
"""A worker hangs if it takes so many times as long as recent batches suggest."""
_LEARNT = 8
"""Batches before expectations count."""
_REMEMBERED = 1024
"""Items remembered from deaths of workers."""
_QUARANTINE = 60.0
"""Seconds for which an item that kills workers is refused, from the last death on."""


@dataclass(slots=True)
class BatchTotals:
    """Totals since start."""

    vit_calls: int = 0
    vit_patches: int = 0
    graph_calls: int = 0
    late_compiles: int = 0
    preprocess_seconds: float = 0.0
    vit_seconds: float = 0.0
    worker_deaths: int = 0


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a worker has computed in one pass, a batch or a part of one. `fill` is its share of the largest possible
    number of patches."""

    units: int
    patches: int
    fill: float
    preprocess_seconds: float
    vit_seconds: float


class Pace:
    """How long patches take on one worker, learned from recent batches."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._patches = 0.0
        self.batches = 0

    def learn(self, patches: int, seconds: float) -> None:
        """Records the time of a batch with so many patches."""
        self._seconds = _KEPT * self._seconds + seconds
        self._patches = _KEPT * self._patches + patches
        self.batches += 1

    def seconds(self, patches: int) -> float | None:
        """The expected seconds for so many patches on one worker; None before the first batch."""
        return self._seconds / self._patches * patches if self._patches else None

    def patches(self, seconds: float) -> int | None:
        """How many patches one worker computes in so many seconds, not necessarily whole passes; None before the first
        batch. If a pass has a fixed cost, passes that turn out too short make the next one larger."""
        return math.ceil(seconds * self._patches / self._seconds) if self._seconds else None

    def limit(self, patches: int, patience: float, max_seconds: float) -> float:
        """Seconds after which a worker with so many patches is considered hung: at least `patience`, and `max_seconds`
        while too little is known."""
        expected = self.seconds(patches)
        if expected is None or self.batches < _LEARNT:
            return max_seconds
        return min(max_seconds, max(patience, _HUNG * expected))


@dataclass(slots=True)
class _Suspect:
    deaths: list[set[int]] = field(default_factory=list)
    until: float = 0.0


class Suspects:
    """Items that were with a worker when it died: they run alone, and a second death gets them refused for a minute.
    After that they are tried again, alone, since something else may have killed the workers.

    For each death, the parts of the items (by first frame group) that were there are kept, by content key, until they
    have been computed: an innocent neighbour is cleared by its next run, and a video part by part.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def blame(self, parts: Iterable[tuple[bytes, int]]) -> None:
        """A worker died over these parts of items."""
        there: dict[bytes, set[int]] = {}
        for key, first_group in parts:
            there.setdefault(key, set()).add(first_group)
        for key, groups in there.items():
            suspect = self._suspects.setdefault(key, _Suspect())
            suspect.deaths.append(groups)
            suspect.until = self._clock() + _QUARANTINE
            self._suspects.move_to_end(key)
        while len(self._suspects) > _REMEMBERED:  # the oldest are forgotten first
            self._suspects.popitem(last=False)

    def clear(self, key: bytes, groups: range) -> None:
        """These frame groups of an item were computed."""
        if (suspect := self._suspects.get(key)) is not None:
            suspect.deaths = [rest for death in suspect.deaths if (rest := death.difference(groups))]
            if not suspect.deaths:
                del self._suspects[key]

    def has(self, key: bytes) -> bool:
        """A worker died over this item, perhaps by chance."""
        return key in self._suspects

    def is_poison(self, key: bytes) -> bool:
        """Workers died over this item more than once, the last one within a minute."""
        suspect = self._suspects.get(key)
        return suspect is not None and len(suspect.deaths) > 1 and suspect.until > self._clock()
