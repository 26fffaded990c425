"""How long computing takes, learnt from what was computed lately. Before the first batch that is not known."""

from __future__ import annotations

_KEPT = 0.8
"""The share of a figure that remains after the next one: about ten batches are remembered."""


_HUNG = 20
"""A worker that takes this many times what recent batches make one expect has hung."""
_LEARNT = 8
"""Batches before expectations count."""


class Pace:
    """Seconds for patches on one worker."""

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

    def limit(self, patches: int, patience: float, max_seconds: float) -> float:
        """Seconds after which a worker that still computes so many patches has hung: `patience` at least, and
        `max_seconds` as long as too little was learnt."""
        expected = self.seconds(patches)
        if expected is None or self.batches < _LEARNT:
            return max_seconds
        return min(max_seconds, max(patience, _HUNG * expected))
