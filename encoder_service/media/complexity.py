"""How much of a file's own structure is read at all: what a decoder walks through, however little it holds.

A picture of 64 pixels a side may consist of a million empty chunks, and a film of ten frames of a million empty
elements. A decoder takes each of them up. So they are counted, in one pass over their heads, before it sees the file.
"""

from __future__ import annotations


class TooComplex(ValueError):
    """A file is made of more parts than are taken."""


class UnusualKind(ValueError):
    """A file is whole, and of a kind that nothing here shows."""


class PartCount:
    """Parts of one file, of which there may be `max_parts`."""

    def __init__(self, max_parts: int) -> None:
        self._left = max_parts

    def add(self, parts: int = 1) -> None:
        """So many more; raises TooComplex for the first one too many."""
        self._left -= parts
        if self._left < 0:
            raise TooComplex("the file has too many parts")
