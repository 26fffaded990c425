"""What the dispatcher remembers of batches: totals, how long they take, and what was there when a worker died."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

_KEPT = 0.8
"""The share of a figure that remains after the next one: about ten batches are remembered."""
_HUNG = 20
"""A worker that takes this many times what recent batches make one expect has hung."""
_LEARNT = 8
"""Batches before expectations count."""
_REMEMBERED = 1024
"""Items that were there when a worker died."""
_QUARANTINE = 60.0
"""Seconds for which poison is refused, from the last death over it on."""


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
    """What a worker has computed in a pass, a batch or a part of one. `fill` is its share of the patches that one may
    have."""

    units: int
    patches: int
    fill: float
    preprocess_seconds: float
    vit_seconds: float


class Pace:
    """How long patches take on one worker, learnt from what was computed lately."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._patches = 0.0
        self.batches = 0

    def learn(self, patches: int, seconds: float) -> None:
        """A batch of so many patches took so long on a worker."""
        self._seconds = _KEPT * self._seconds + seconds
        self._patches = _KEPT * self._patches + patches
        self.batches += 1

    def seconds(self, patches: int) -> float | None:
        """What so many patches should take on one worker; None before anything was learnt."""
        return self._seconds / self._patches * patches if self._patches else None

    def patches(self, seconds: float) -> int | None:
        """How many patches one worker should get through in so many seconds, the last one perhaps not whole; None
        before anything was learnt. Where a pass takes a time of its own beside that of its patches, passes that are
        shorter than wished make the next one larger, until they are as long."""
        return math.ceil(seconds * self._patches / self._seconds) if self._seconds else None

    def limit(self, patches: int, patience: float, max_seconds: float) -> float:
        """Seconds after which a worker that still computes so many patches has hung: `patience` at least, and
        `max_seconds` as long as too little was learnt."""
        expected = self.seconds(patches)
        if expected is None or self.batches < _LEARNT:
            return max_seconds
        return min(max_seconds, max(patience, _HUNG * expected))


@dataclass(slots=True)
class _Suspect:
    deaths: list[set[int]] = field(default_factory=list)
    until: float = 0.0


class Suspects:
    """Items that were with a worker when it died: they run alone, and a second death makes one poison for a minute. It
    is tried again then, still alone: what ended the workers may have been something else.

    Of each death are kept, by content key, the parts of the item (by their first frame group) that were there and have
    not been computed since: an innocent neighbour is cleared by its next run, each part of a video by its own.
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
        while len(self._suspects) > _REMEMBERED:  # the longest known are forgotten first
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
