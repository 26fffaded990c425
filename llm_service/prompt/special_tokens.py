"""Where a text has names of special tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

_SPACE = re.compile(r"\s*")


class SpecialTokens:
    """Cuts texts at the special tokens of a tokenizer: `entries` are those of its `added_tokens`. Of several names that
    begin at a place the longest counts. A caller may lay out a megabyte, and while it is read no other thread runs: so
    it is read once, however many tokens there are, and however much space."""

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self._ids = {each["content"]: int(each["id"]) for each in entries}
        self._strips_before = {each["content"] for each in entries if each.get("lstrip")}
        self._strips_behind = {each["content"] for each in entries if each.get("rstrip")}
        self._names = re.compile(_any_of(self._ids) if self._ids else r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The text in pieces: ids, and what is between them without the space that some tokens take with them."""
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
