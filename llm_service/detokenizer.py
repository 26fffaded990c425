"""Tokens into text as they come: whole characters only, and nothing that could still become a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one choice. After `stopped` is set, no more text comes; before `least` tokens it never is, and a stop
    text that comes whole before them is text like any other."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), least: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._least = least
        self._ids: list[int] = []
        self._decoded = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Takes a token; the text that is now certain, often empty."""
        self._ids.append(token)
        new = self._stream.step(self._tokenizer, token) or ""
        return self._release(new)

    def finish(self) -> str:
        """What is left when a choice ends by itself: text held back, and the rest of an unfinished character (as �)."""
        if self.stopped is not None:
            return ""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return self._release(whole[self._decoded :], last=True)

    def _release(self, new: str, *, last: bool = False) -> str:
        self._decoded += len(new)
        text, known = self._held + new, len(self._held)
        self._held = ""
        ends = self._stop if len(self._ids) >= self._least else ()
        # What ends within the text that was held had its chance: it came whole before `least`.
        places = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in ends)
        at, found = min((place for place in places if place[0] >= 0), default=(-1, ""))
        if found:
            self.stopped = found
            return text[:at]
        keep = 0 if last else _possible_start(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that begin one of the stop texts: the longest such end.

    >>> _possible_start("the en", ["end", "."])
    2
    """
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
