"""Texts of callers while a chat template runs. Jinja joins strings by their content, so a mark stands for each text,
and texts are inserted at the end. Methods that the template calls on a string work on the text itself, and their
results still count as the caller's."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_ANSWERED_ALONE = (
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
    *("isspace", "istitle", "isupper", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"),
)
"""Methods that give no text."""
_MADE_BY_PART = ("lower", "upper", "casefold", "swapcase")
_MADE_ANEW = ("capitalize", "title", "center", "ljust", "rjust", "zfill", "expandtabs", "translate")
"""Methods whose result belongs to the caller as a whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a text: the number of the caller's text that it comes from, 0 for the template's own, and the string
    that stands for it."""

    text: str
    source: int
    mark: str


class CallerTexts:
    """The texts of one conversation, while it is laid out."""

    def __init__(self) -> None:
        name = secrets.token_hex(8)
        self._begin = f"\ue000{name}:"
        self._mark = re.compile(f"{self._begin}(\\d+)\ue001")
        self._parts: list[Part] = []

    def put(self, text: str, source: int = 0) -> CallerText:
        """The mark for a text that comes from the caller's text `source`, or is a new one (0)."""
        return CallerText(self, [self.part(text, source or len(self._parts) + 1)])

    def part(self, text: str, source: int) -> Part:
        """A stretch of one of the texts."""
        if not source:
            return Part(text, 0, text)
        self._parts.append(Part(text, source, f"{self._begin}{len(self._parts)}\ue001"))
        return self._parts[-1]

    def parts(self, text: str) -> list[Part]:
        """The parts of a string with marks."""
        text = _marked(text)
        found: list[Part] = []
        at = 0
        for mark in self._mark.finditer(text) if self._begin in text else ():
            if at < mark.start():
                found.append(self.part(text[at : mark.start()], 0))
            found.append(self._parts[int(mark[1])])
            at = mark.end()
        return [*found, self.part(text[at:], 0)] if at < len(text) else found

    def read(self, text: str) -> str:
        """The text that a string with marks stands for."""
        return CallerText(self, self.parts(text)) if self._begin in _marked(text) else text

    def within_json(self, text: str, *, ensure_ascii: bool) -> str:
        """The same for JSON, in which the texts are escaped."""
        parts: list[Part] = []
        for part in self.parts(text):
            if part.source:
                written = json.dumps(part.text, ensure_ascii=ensure_ascii)[1:-1]
            else:
                written = _NOT_ASCII.sub(_escaped, part.text) if ensure_ascii else part.text
            parts.append(self.part(written, part.source))
        return CallerText(self, parts)


class CallerText(str):
    """A text with something in it that a caller wrote."""

    __slots__ = ("_parts", "_plain", "_texts")
    _parts: Sequence[Part]
    _plain: str
    _texts: CallerTexts

    def __new__(cls, texts: CallerTexts, parts: Sequence[Part]) -> Self:
        made = super().__new__(cls, "".join(part.mark for part in parts))
        made._texts, made._parts = texts, parts
        made._plain = "".join(part.text for part in parts)
        return made

    @property
    def _source(self) -> int:
        return next((part.source for part in self._parts if part.source), 0)

    @property
    def _sources(self) -> set[int]:
        return {part.source for part in self._parts if part.source}

    def _cut(self, start: int, stop: int) -> CallerText:
        """The part between two positions; an empty part still knows where it was."""
        parts: list[Part] = []
        end = 0
        for part in self._parts:
            at, end = end, end + len(part.text)
            if start <= at and end <= stop:
                parts.append(part)
            elif (text := part.text[max(0, start - at) : max(0, stop - at)]) or (not parts and at <= start <= end):
                parts.append(self._texts.part(text, part.source))
        return CallerText(self._texts, parts)

    def _in_turn(self, words: Iterable[str], gap: int = 0) -> list[Any]:
        """Words of the text, in order, with `gap` characters between two of them."""
        found: list[CallerText] = []
        at = 0
        for word in words:
            found.append(self._cut(at, at + len(word)))
            at += len(word) + gap
        return found

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._texts.put(repr(self._plain), self._source)

    def __hash__(self) -> int:
        return hash(self._plain)

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._plain != plain(other))

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self._plain)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            self._plain[key]  # raises what a string raises
            at = key.__index__() % len(self._plain)
            return self._cut(at, at + 1)
        start, stop, step = key.indices(len(self._plain))
        if step == 1:
            return self._cut(start, max(start, stop))
        return self._joined("", [self._cut(at, at + 1) for at in range(start, stop, step)])

    def __add__(self, other: object) -> str:
        return self._joined("", [self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return self._joined("", [other, self]) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return self._joined("", [self] * count.__index__())

    __rmul__ = __mul__

    def _joined(self, between: str, texts: Iterable[str]) -> CallerText:
        return CallerText(self._texts, self._texts.parts(str.join(_marked(between), map(_marked, texts))))

    def join(self, texts: Iterable[str], /) -> str:
        """As a string's."""
        return self._joined(self, texts)

    def strip(self, signs: str | None = None, /) -> str:
        """As a string's."""
        start = len(self._plain) - len(self._plain.lstrip(plain(signs)))
        return self._cut(start, max(start, len(self._plain.rstrip(plain(signs)))))

    def lstrip(self, signs: str | None = None, /) -> str:
        """As a string's."""
        return self._cut(len(self._plain) - len(self._plain.lstrip(plain(signs))), len(self._plain))

    def rstrip(self, signs: str | None = None, /) -> str:
        """As a string's."""
        return self._cut(0, len(self._plain.rstrip(plain(signs))))

    def removeprefix(self, prefix: str, /) -> str:
        """As a string's."""
        return self._cut(len(self._plain) - len(self._plain.removeprefix(plain(prefix))), len(self._plain))

    def removesuffix(self, suffix: str, /) -> str:
        """As a string's."""
        return self._cut(0, len(self._plain.removesuffix(plain(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        """As a string's."""
        return self._words(self._plain.split(plain(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        """As a string's."""
        return self._words(self._plain.rsplit(plain(sep), maxsplit), sep)

    def _words(self, words: list[str], sep: str | None) -> list[Any]:
        if sep is not None:
            return self._in_turn(words, len(sep))
        found: list[CallerText] = []
        at = 0
        for word in words:  # none begins with white space but one that is the text's beginning
            at = self._plain.index(word, at)
            found.append(self._cut(at, at + len(word)))
            at += len(word)
        return found

    def splitlines(self, keepends: bool = False) -> list[Any]:
        """As a string's."""
        lines = self._in_turn(self._plain.splitlines(keepends=True))
        ends = self._plain.splitlines(keepends=keepends)
        return [line[: len(end)] for line, end in zip(lines, ends, strict=True)]

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        """As a string's."""
        before, between, behind = self._in_turn(self._plain.partition(plain(sep)))
        return before, between, behind

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        """As a string's."""
        before, between, behind = self._in_turn(self._plain.rpartition(plain(sep)))
        return before, between, behind

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As a string's."""
        if not old:
            return self._texts.put(self._plain.replace("", plain(new), count), self._source)
        return self._joined(new, self.split(old, count))


def _escaped(sign: re.Match[str]) -> str:
    return json.dumps(sign[0])[1:-1]


def _marked(text: str) -> str:
    """The string with marks itself."""
    return str.__str__(text)


def plain(value: Any) -> Any:
    """A text as a plain string; other values unchanged."""
    return value._plain if isinstance(value, CallerText) else value


def sources(text: str) -> set[int]:
    """The numbers of the callers' texts that something in a text is of."""
    return text._sources if isinstance(text, CallerText) else set()


def made_anew(work: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Applies `work` to the texts themselves; a text that results from a caller's text belongs to the caller as a
    whole."""
    texts = [each for each in given if isinstance(each, CallerText)]
    made = work(*map(plain, given), **{name: plain(value) for name, value in options.items()})
    return texts[0]._texts.put(str(made), texts[0]._source) if texts and isinstance(made, str) else made


def _answered_alone(name: str) -> Callable[..., Any]:
    def answer(self: CallerText, *given: Any) -> Any:
        told = [tuple(map(plain, each)) if type(each) is tuple else plain(each) for each in given]
        return getattr(self._plain, name)(*told)

    return answer


def _made_by_part(name: str) -> Callable[[CallerText], CallerText]:
    def make(self: CallerText) -> CallerText:
        return CallerText(
            self._texts, [self._texts.part(getattr(part.text, name)(), part.source) for part in self._parts]
        )

    return make


def _made_anew(name: str) -> Callable[..., Any]:
    def make(self: CallerText, *given: Any, **options: Any) -> Any:
        return made_anew(getattr(str, name), self, *given, **options)

    return make


for _names, _method in (
    (_ANSWERED_ALONE, _answered_alone),
    (_MADE_BY_PART, _made_by_part),
    (_MADE_ANEW, _made_anew),
):
    for _name in _names:
        setattr(CallerText, _name, _method(_name))
