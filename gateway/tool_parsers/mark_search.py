"""Looks for marks in a text that comes in pieces, but not where the text quotes something."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Quotes:
    """What opens a quotation, each with what closes it; `escapes`: a backslash takes the next sign's meaning away."""

    marks: Mapping[str, str] = field(default_factory=dict)
    escapes: bool = False

    @cached_property
    def closing(self) -> dict[str, re.Pattern[str]]:
        """By what opens a quotation, what is looked for within it."""
        escaped = r"\\.|" if self.escapes else ""
        return {one: re.compile(escaped + re.escape(other), re.DOTALL) for one, other in self.marks.items()}


JSON_TEXTS = Quotes({'"': '"'}, escapes=True)


class MarkSearch:
    """One search. Each text that it is asked about begins with the one before, of which it reads nothing again. The
    marks are of one length, and what opens a quotation is no longer."""

    def __init__(self, marks: Sequence[str], quotes: Quotes, begin: int = 0) -> None:
        self._quotes = quotes
        self._size = len(marks[0])
        self._outside = re.compile("|".join(map(re.escape, (*marks, *quotes.marks))))
        self._at = begin
        self._quote = ""

    def found(self, text: str, *, last: bool = False) -> Iterator[re.Match[str]]:
        """The marks that were not found before. `last`: no more text will come."""
        while True:
            pattern = self._quotes.closing[self._quote] if self._quote else self._outside
            match = pattern.search(text, self._at)
            # What begins behind this place may be the beginning of something longer.
            surely = len(text) if self._quote or last else len(text) - self._size
            if match is None or match.start() > surely:
                kept = max(len(self._quotes.marks[self._quote]), 2) if self._quote else self._size
                self._at = max(self._at, len(text) - kept + 1)
                return
            self._at = match.end()
            if self._quote:
                self._quote = self._quote if self._quotes.escapes and match[0][0] == "\\" else ""
            elif match[0] in self._quotes.marks:
                self._quote = match[0]
            else:
                yield match


class ValueEnd:
    """Looks for the end of a value that begins with a bracket, at this place; then for those that follow."""

    def __init__(self, quotes: Quotes, begin: int) -> None:
        self._brackets = MarkSearch("[]{}()", quotes, begin)
        self._depth = 0

    def find(self, text: str) -> int:
        """The place behind it; -1 where it has not come yet. Each text begins with the one before."""
        for bracket in self._brackets.found(text):
            self._depth += 1 if bracket[0] in "[{(" else -1
            if not self._depth:
                return bracket.end()
        return -1
