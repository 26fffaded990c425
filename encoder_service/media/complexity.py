"""Bounds how many parts of a file's structure are read.

A picture of 64 × 64 pixels may have a million empty chunks, and a film of ten frames a million empty elements, and a
decoder visits each of them. So they are counted, in one pass over their heads, before a decoder sees the file.
"""

from __future__ import annotations


class TooComplex(ValueError):
    """A file is made of more parts than are taken."""


class UnusualKind(ValueError):
    """A file is whole, and of a kind that nothing here shows."""


class PartCount:
    """Counts the parts of one file, at most `max_parts`."""

    def __init__(self, max_parts: int) -> None:
        self._left = max_parts

    def add(self, parts: int = 1) -> None:
        """Counts further parts; raises TooComplex beyond the bound."""
        self._left -= parts
        if self._left < 0:
            raise TooComplex("the file has too many parts")
