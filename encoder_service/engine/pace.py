"""How long computing takes, learnt from what was computed lately. Before the first batch that is not known."""

from __future__ import annotations

_KEPT = 0.8
"""The share of a figure that remains after the next one: about ten batches are remembered."""


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
