"""Incomplete calls: the function's name, and the part of its arguments that is certain, for streams."""

from __future__ import annotations

import json
import re
from typing import Final

from gateway.tool_parsers.arguments import parsed, written
from gateway.tool_parsers.tool_parser import Functions

_CLOSED_BY: Final = {"{": "}", "[": "]"}
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB]..\\u[dD][c-fC-F]..)')
_LONGEST_ESCAPE: Final = 12
_LONGEST_WORD: Final = 64
_WORD = re.compile(r"[^\s,:\[\]{}\"]{1,64}(?=[\s,\]}])")


class JsonCopy:
    """Copies an object that comes in pieces, as it will be written when complete, except its last bracket: so nobody
    takes it for complete. Invalid JSON ends the copy, and so does a number with many digits."""

    def __init__(self) -> None:
        self._at = 0
        self._open: list[str] = []  # closes each open object and list
        self._next = self._value
        self._may_close = False  # the open one is empty and may end here
        self._is_key = False
        self._goes_on = True

    def more(self, text: str, begin: int) -> str:
        """The text that has become certain. The object begins at `begin`; each text begins with the one before."""
        out: list[str] = []
        self._at = self._at or begin
        while self._goes_on and self._at < len(text):
            if self._next != self._rest_of_text:
                blank = _BLANK.match(text, self._at)
                self._at = blank.end() if blank else self._at
                if self._at == len(text):
                    break
            if not self._next(text, out):
                break
        return "".join(out)

    def _ended(self) -> bool:
        self._goes_on = False
        return False

    def _close(self, out: list[str]) -> bool:
        bracket = self._open.pop()
        if not self._open:
            return self._ended()
        return self._takes(bracket, out)

    def _takes(self, sign: str, out: list[str]) -> bool:
        """A value has ended; takes the separator from the next."""
        self._at += 1
        out.append(sign)
        self._may_close = False
        self._next = self._behind_value
        return True

    def _value(self, text: str, out: list[str]) -> bool:
        sign = text[self._at]
        if self._may_close and sign == self._open[-1]:
            return self._close(out)
        self._may_close = False
        if sign in _CLOSED_BY:
            self._takes(sign, out)
            self._open.append(_CLOSED_BY[sign])
            self._next, self._may_close = (self._key if sign == "{" else self._value), True
            return True
        if sign == '"':
            self._takes(sign, out)
            self._next = self._rest_of_text
            return True
        return self._word(text, out)

    def _word(self, text: str, out: list[str]) -> bool:
        """A number or a literal: it is certain when something follows it."""
        word = _WORD.match(text, self._at)
        if word is None:
            return False if len(text) - self._at <= _LONGEST_WORD else self._ended()
        value = parsed(word[0])
        if value is None and word[0] != "null":
            return self._ended()
        self._at = word.end() - 1
        return self._takes(written(value) or "", out)

    def _key(self, text: str, out: list[str]) -> bool:
        sign = text[self._at]
        if self._may_close and sign == "}":
            return self._close(out)
        if sign != '"':
            return self._ended()
        self._takes(sign, out)
        self._is_key = True
        self._next = self._rest_of_text
        return True

    def _rest_of_text(self, text: str, out: list[str]) -> bool:
        if plain := _PLAIN.match(text, self._at):
            out.append(plain[0])
            self._at = plain.end()
            return True
        if text[self._at] == '"':
            is_key, self._is_key = self._is_key, False
            self._takes('"', out)
            self._next = self._colon if is_key else self._behind_value
            return True
        if escape := _ESCAPE.match(text, self._at):
            said = parsed(f'"{escape[0]}"')
            if said is None:
                return self._ended()
            out.append(json.dumps(said, ensure_ascii=False)[1:-1])
            self._at = escape.end()
            return True
        may_be = text[self._at] == "\\" and len(text) - self._at < _LONGEST_ESCAPE
        return False if may_be else self._ended()

    def _colon(self, text: str, out: list[str]) -> bool:
        if text[self._at] != ":":
            return self._ended()
        self._takes(": ", out)
        self._next = self._value
        return True

    def _behind_value(self, text: str, out: list[str]) -> bool:
        sign = text[self._at]
        if sign == self._open[-1]:
            return self._close(out)
        if sign != ",":
            return self._ended()
        self._takes(", ", out)
        self._next = self._key if self._open[-1] == "}" else self._value
        return True


class BegunCall:
    """The call behind a mark, if it is one of an offered function. `heads`: the text before its arguments, with its
    `name`."""

    def __init__(self, heads: tuple[re.Pattern[str], ...], functions: Functions) -> None:
        self._heads, self._functions = heads, functions
        self._copy = JsonCopy()
        self._begin = 0
        self.name = ""
        self.num_sent = 0
        """Characters of its arguments that were told."""

    def more(self, text: str) -> str:
        """The arguments that have become certain; the name is known from the first on. Each text begins with the one
        before."""
        if not self.name:
            head = next(filter(None, (head.match(text) for head in self._heads)), None)
            if head is None or head["name"] not in self._functions:
                return ""
            self.name, self._begin = head["name"], head.end()
        more = self._copy.more(text, self._begin)
        self.num_sent += len(more)
        return more
