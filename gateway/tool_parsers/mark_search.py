"""Finds a mark in a text that comes in pieces, except inside quotations."""

from __future__ import annotations

import re
from collections.abc import Mapping


class MarkSearch:
    """One search. Each text begins with the one before, of which nothing is read again. `quotes` maps what opens a
    quotation to what closes it; none of these is longer than the mark, or begins it."""

    def __init__(self, mark: str, quotes: Mapping[str, str]) -> None:
        self._mark, self._quotes = mark, quotes
        self._outside = re.compile("|".join(map(re.escape, (mark, *quotes))))
        self._at = 0
        self._closing = ""  # closes the open quotation

    def find(self, text: str) -> int:
        """The mark's position; -1 if it has not come yet."""
        while True:
            if self._closing:
                place, found = text.find(self._closing, self._at), self._closing
            else:
                match = self._outside.search(text, self._at)
                place, found = (match.start(), match[0]) if match else (-1, self._mark)
            if place < 0:
                self._at = max(self._at, len(text) - len(found) + 1)
                return -1
            if found == self._mark:
                return place
            self._at = place + len(found)
            self._closing = "" if self._closing else self._quotes[found]
