"""Finds the names of special tokens in texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

_SPACE = re.compile(r"\s*")


class SpecialTokens:
    """Cuts texts at the special tokens of a tokenizer, given its `added_tokens` as `entries`. The longest name at a
    position counts. A text may have a megabyte, and no other thread runs while it is read; so it is read once, however
    many tokens or spaces it has."""

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self._ids = {each["content"]: int(each["id"]) for each in entries}
        self._strips_before = {each["content"] for each in entries if each.get("lstrip")}
        self._strips_behind = {each["content"] for each in entries if each.get("rstrip")}
        self._names = re.compile(_any_of(self._ids) if self._ids else r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The text in pieces: ids, and the text between them, without the space that some tokens absorb."""
        at = 0
        while (found := self._names.search(text, at)) is not None:
            name, before = found[0], text[at : found.start()]
            if between := before.rstrip() if name in self._strips_before else before:
                yield between
            yield self._ids[name]
            behind = _SPACE.match(text, found.end()) if name in self._strips_behind else None
            at = found.end() if behind is None else behind.end()
        if at < len(text):
            yield text[at:]


def _any_of(words: Collection[str]) -> str:
    """A pattern of the longest of these words at a place, which never reads one of its signs twice: words that begin
    alike share that part.

    >>> _any_of(["<b>", "<a1>", "<a12>", "<a>", "<a", "c"])
    '(?:<(?:a(?:1(?:2>|>)|>)?|b>)|c)'
    """
    groups = groupby(sorted(filter(None, words)), key=lambda word: word[0])
    parts = [_beginning_alike(list(group)) for _, group in groups]
    some = "|".join(parts)
    if "" in words:
        return f"(?:{some})?"
    return some if len(parts) == 1 else f"(?:{some})"


def _beginning_alike(words: Sequence[str]) -> str:
    """Words that have their first sign in common."""
    first, last = min(words), max(words)
    alike = takewhile(lambda signs: signs[0] == signs[1], zip(first, last, strict=False))
    shared = "".join(sign for sign, _ in alike)
    rests = {word[len(shared) :] for word in words}
    return re.escape(shared) + (_any_of(rests) if rests != {""} else "")
