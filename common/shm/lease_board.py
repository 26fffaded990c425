"""A page of shared memory that says which leases hold, for a reader who copies what it has leased. A lease has a slot,
and in it a number that is never used again, which the owner clears before it lets anyone write there. So a reader
copies first and looks afterwards: where the number still stands, it has what it leased, however long it slept."""

from __future__ import annotations

import threading
from collections import deque

from common.shm.arena import ReaderView, SharedBuffer

WORD = 8
"""Bytes of a slot: one aligned word, which a processor writes and reads in one piece."""


class LeaseBoard:
    """The owner's side: `slots` slots, written by one thread."""

    def __init__(self, slots: int) -> None:
        self.buffer = SharedBuffer.create("twinlens-leases", slots * WORD)
        self._words = self.buffer.view.cast("Q")
        self._free = deque(range(slots))
        self._numbers = 0

    @property
    def room(self) -> int:
        """Slots that are free."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._words) - len(self._free)

    def post(self) -> tuple[int, int] | None:
        """Takes a slot and writes a new number into it: (slot, number); None where every slot is in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._numbers += 1
        self._words[slot] = self._numbers
        return slot, self._numbers

    def clear(self, slot: int) -> None:
        """Ends the lease of a slot. What it covered may be written again once this has returned."""
        assert self._words[slot], "this slot is free"
        self._words[slot] = 0
        self._free.append(slot)

    def close(self) -> None:
        """Unmaps."""
        self._words.release()
        self.buffer.close()


class BoardReader:
    """The reader's side."""

    def __init__(self, view: ReaderView) -> None:
        self._words = view.view.cast("Q")
        self._fence = threading.Lock()

    def holds(self, slot: int, number: int) -> bool:
        """Whether the lease holds; asked after the bytes were copied. False for a slot that does not exist."""
        with self._fence:  # taking a lock keeps the processor from reading the word before the bytes
            return 0 <= slot < len(self._words) and number > 0 and self._words[slot] == number

    def close(self) -> None:
        """Lets go of the view."""
        self._words.release()
