"""Values that some models write in calls instead of JSON: Python literals, and Gemma's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_DEEPEST: Final = 64
"""Lists and objects in each other that are read."""
_BLANK = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_KEY = re.compile(r"[^\s:,{}\[\]<]+")
_ENDS = r"(?!\s*(?:[,:)\]}]|$))"
_PYTHON_TEXT = re.compile(rf"""\"(?:[^"\\]++|\\.|"{_ENDS})*"|'(?:[^'\\]++|\\.|'{_ENDS})*'""", re.DOTALL)
"""Templates quote strings without escaping them: a quote that no delimiter follows is an apostrophe."""
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", '"': '"', "'": "'"}
_GEMMA_TEXT = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_WORDS: Final = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class NoLiteral(ValueError):
    """A text is not written so."""


@dataclass(frozen=True, slots=True)
class _Style:
    """How strings are written and read, and whether an object's keys may be unquoted."""

    text: re.Pattern[str]
    said: Callable[[str], str]
    bare_keys: bool = False


_PYTHON: Final = _Style(_PYTHON_TEXT, lambda text: _ESCAPED.sub(_unescaped, text[1:-1]))
_GEMMA: Final = _Style(_GEMMA_TEXT, lambda text: text[5:-5], bare_keys=True)


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Calls in a list, `[name(key=value, …), …]`, each as its name and arguments. Raises NoLiteral.

    >>> python_calls("[f(a='it', b=[1, True]), g()]")
    [('f', {'a': 'it', 'b': [1, True]}), ('g', {})]
    """
    reader = _Literals(text, _PYTHON)
    calls = [reader.call() for _ in reader.items("[", "]")]
    reader.end()
    return calls


def gemma_call(text: str) -> tuple[str, dict[str, Any]]:
    """One call, `call:name{key:value,…}`, as its name and arguments. Raises NoLiteral.

    >>> gemma_call('call:f{a:<|"|>it<|"|>,b:{c:[1.5,true]}}')
    ('f', {'a': 'it', 'b': {'c': [1.5, True]}})
    """
    reader = _Literals(text, _GEMMA)
    reader.take("call:")
    name = reader.name()
    arguments = reader.value()
    reader.end()
    if not isinstance(arguments, dict):
        raise NoLiteral
    return name, arguments


class _Literals:
    """Reads one text from its beginning to its end."""

    def __init__(self, text: str, style: _Style) -> None:
        self._text, self._style = text, style
        self._at = 0
        self._depth = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        """A function's name, and arguments that have names."""
        name = self.name()
        arguments: dict[str, Any] = {}
        for _ in self.items("(", ")"):
            key = self._taken(_WORD)
            self.take("=")
            arguments[key] = self.value()
        return name, arguments

    def name(self) -> str:
        """A function's name."""
        return self._taken(_NAME)

    def value(self) -> Any:
        """A text, a number, a word that stands for a value, a list or an object."""
        if self._is_next("["):
            return [self.value() for _ in self.items("[", "]")]
        if self._is_next("{"):
            return self._pairs()
        if (text := self._found(self._style.text)) is not None:
            return self._style.said(text)
        if (number := self._found(_NUMBER)) is not None:
            return _number(number)
        word = self._taken(_WORD)
        if word not in _WORDS:
            raise NoLiteral
        return _WORDS[word]

    def _pairs(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in self.items("{", "}"):
            quoted = self._found(self._style.text)
            if quoted is None and not self._style.bare_keys:
                raise NoLiteral
            key = self._taken(_KEY) if quoted is None else self._style.said(quoted)
            self.take(":")
            found[key] = self.value()
        return found

    def items(self, begin: str, end: str) -> Iterator[None]:
        """Once for each element between these delimiters, separated by commas; the last may be followed by one."""
        self.take(begin)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NoLiteral
        while not self._is_next(end):
            yield
            if not self._is_next(end):
                self.take(",")
        self.take(end)
        self._depth -= 1

    def take(self, sign: str) -> None:
        """Consumes the next character, which must be this one."""
        if not self._is_next(sign):
            raise NoLiteral
        self._at += len(sign)

    def end(self) -> None:
        """Nothing may come."""
        self._skip()
        if self._at < len(self._text):
            raise NoLiteral

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        self._at = blank.end() if blank else self._at

    def _is_next(self, sign: str) -> bool:
        self._skip()
        return self._text.startswith(sign, self._at)

    def _found(self, pattern: re.Pattern[str]) -> str | None:
        self._skip()
        if (found := pattern.match(self._text, self._at)) is None:
            return None
        self._at = found.end()
        return found[0]

    def _taken(self, pattern: re.Pattern[str]) -> str:
        if (found := self._found(pattern)) is None:
            raise NoLiteral
        return found


def _number(text: str) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:  # of thousands of digits
        raise NoLiteral from error


def _unescaped(escape: re.Match[str]) -> str:
    word = escape[1]
    if len(word) > 1:
        number = int(word[1:], 16)
        return chr(number) if number <= 0x10FFFF else escape[0]
    return _ESCAPES.get(word, escape[0])
