"""What the dispatcher remembers of batches: totals, how long they take, and what was there when a worker died."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

_KEPT = 0.8
"""The share of a figure that remains after the next one: about ten batches are remembered."""
_HUNG = 20
"""A worker that takes this many times what recent batches make one expect has hung."""
_LEARNT = 8
"""Batches before expectations count."""
_REMEMBERED = 1024
"""Items that were there when a worker died."""


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


class Suspects:
    """Items that were with a worker when it died: they run alone, and a second death makes one poison.

    Of each death are kept, by content key, the parts of the item (by their first frame group) that were there and have
    not been computed since: an innocent neighbour is cleared by its next run, each part of a video by its own.
    """

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, list[set[int]]] = OrderedDict()

    def blame(self, parts: Iterable[tuple[bytes, int]]) -> None:
        """A worker died over these parts of items."""
        there: dict[bytes, set[int]] = {}
        for key, first_group in parts:
            there.setdefault(key, set()).add(first_group)
        for key, groups in there.items():
            self._deaths.setdefault(key, []).append(groups)
            self._deaths.move_to_end(key)
        while len(self._deaths) > _REMEMBERED:  # the longest known are forgotten first
            self._deaths.popitem(last=False)

    def clear(self, key: bytes, groups: range) -> None:
        """These frame groups of an item were computed."""
        left = [rest for death in self._deaths.pop(key, ()) if (rest := death.difference(groups))]
        if left:
            self._deaths[key] = left

    def has(self, key: bytes) -> bool:
        """A worker died over this item, perhaps by chance."""
        return key in self._deaths

    def is_poison(self, key: bytes) -> bool:
        """Workers died over this item more than once."""
        return len(self._deaths.get(key, ())) > 1
