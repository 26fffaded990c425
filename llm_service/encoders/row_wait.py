"""How long an encoder works on an item without a row, by what it says while it is listened to."""

from __future__ import annotations

_ELSEWHERE, _ROOM = ("fetch", "shared"), "room"
"""Stages in which an encoder waits for others: a media host or another encoder; readers of its results."""


class RowWait:
    """The wait for an item's next row, in seconds, up to the last message: since the encoder has the request, has sent
    the last row, or has last waited for others. `with_room` includes its waiting for room of its own.

    Only time in which a message was awaited counts, and not that before later rows, which a slow network may take. So
    the wait grows by the encoder's messages that it is at work. `longest` is the longest wait for a row that has come.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.with_room = 0.0
        self.longest = 0.0
        self._has_rows = False

    def on_rows(self, seconds: float) -> None:
        """Rows have come, awaited for so many seconds."""
        taken = self.seconds if self._has_rows else self.seconds + seconds
        self.longest = max(self.longest, taken)
        self._has_rows = True
        self.restart()

    def on_message(self, seconds: float, stage: str) -> None:
        """Another message has come, awaited for so many seconds; `stage` is what it says to be done, if anything."""
        self.seconds = 0.0 if stage in (*_ELSEWHERE, _ROOM) else self.seconds + seconds
        self.with_room = 0.0 if stage in _ELSEWHERE else self.with_room + seconds

    def restart(self) -> None:
        """Rows of the item have come."""
        self.seconds = self.with_room = 0.0
