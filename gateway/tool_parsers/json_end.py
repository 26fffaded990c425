"""Finds where JSON ends in a text that comes in pieces, or that it is invalid, by brackets, strings and separators
alone."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

NOT_YET: Final = -1
NO_JSON: Final = -2

_BLANK: Final = re.compile(r"[ \t\n\r]*+")
_IN_TEXT: Final = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_IN_WORD: Final = re.compile(r"[\w.+-]*+")
_CLOSED_BY: Final = {"{": "}", "[": "]"}


class _Next(Enum):
    """What comes next; for an object or list that begins, its end as well."""

    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    FIRST_VALUE = auto()
    VALUE = auto()
    BEHIND_VALUE = auto()


class JsonEnd:
    """Finds the end of an object or list. Any word counts as a value, and strings may contain newlines: parsing will
    detect that."""

    def __init__(self) -> None:
        self._at = 0
        self._open: list[str] = []  # closes each open object and list
        self._next = _Next.VALUE
        self._in_text = self._in_word = False
        self._found = NOT_YET

    @property
    def looked_at(self) -> int:
        """Characters up to here may be JSON."""
        return self._at

    def find(self, text: str, begin: int = 0) -> int:
        """The position behind it, NOT_YET, or NO_JSON. It begins at `begin`; each text begins with the one before."""
        at = max(self._at, begin)
        while at < len(text) and self._found == NOT_YET:
            if self._in_text:
                at = _end(_IN_TEXT, text, at)
                if text[at : at + 1] != '"':
                    break  # the text ends here, maybe within an escape
                self._in_text = False
                at += 1
                continue
            if self._in_word:
                at = _end(_IN_WORD, text, at)
                self._in_word = at == len(text)
            at = _end(_BLANK, text, at)
            if at == len(text):
                break
            if not self._takes(text[at]):
                self._found = NO_JSON
                break
            at += 1
            if not self._open:
                self._found = at
        self._at = at
        return self._found

    def broken_end(self, text: str) -> str:
        """See `broken_end`, of the text that was looked at last."""
        half_escape = "\\" if self._in_text and self._at < len(text) else ""
        bracket = "}" if self._open and self._open[-1] == "]" else "]"
        return half_escape + ('"' if self._in_text else "") + bracket

    def _takes(self, sign: str) -> bool:
        """Whether JSON may go on so, outside its texts."""
        now, self._next = self._next, _Next.BEHIND_VALUE
        if self._open and sign == self._open[-1]:
            self._open.pop()
            return now in (_Next.BEHIND_VALUE, _Next.FIRST_KEY, _Next.FIRST_VALUE)
        match now:
            case _Next.FIRST_KEY | _Next.KEY:
                self._next, self._in_text = _Next.COLON, sign == '"'
                return self._in_text
            case _Next.COLON:
                self._next = _Next.VALUE
                return sign == ":"
            case _Next.BEHIND_VALUE:
                self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
                return sign == ","
            case _:
                if bracket := _CLOSED_BY.get(sign):
                    self._open.append(bracket)
                    self._next = _Next.FIRST_KEY if sign == "{" else _Next.FIRST_VALUE
                    return True
                self._in_text, self._in_word = sign == '"', _IN_WORD.fullmatch(sign) is not None
                return bool(self._open) and (self._in_text or self._in_word)


def broken_end(text: str) -> str:
    """What makes JSON that is open none, for readers too that close what is open by its brackets: one that closes
    nothing.

    >>> broken_end('{"path": "/tm'), broken_end('{"days": [1'), broken_end('{"path": "C:\\\\')
    ('"]', '}', '\\\\"]')
    """
    search = JsonEnd()
    search.find(text)
    return search.broken_end(text)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the match of the pattern ends; it may be empty."""
    found = pattern.match(text, at)
    return found.end() if found else at
