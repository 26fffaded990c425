"""Tokens into text as they come: whole characters only, and nothing that could still become a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PATIENCE = 16
"""Tokens in a row that give no text, after which the stream is begun anew: with each further one it would decode all of
them again. A character has four tokens at most, but special tokens may stand in it, and bytes may be no character."""


class Detokenizer:
    """The text of one choice. After `stopped` is set, no more text comes; before `least` tokens it never is, and a stop
    text that comes whole before them is text like any other."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), least: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._least = least
        self._ids: list[int] = []
        self._open: list[int] = []
        self._decoded = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Takes a token; the text that is now certain, often empty."""
        self._ids.append(token)
        self._open.append(token)
        new = self._stream.step(self._tokenizer, token) or ""
        if new:
            self._open.clear()
        elif len(self._open) % _PATIENCE == 0:
            new = self._begin_anew()
        return self._release(new)

    def _begin_anew(self) -> str:
        """What is certain of the tokens that have given no text: all but a � at the end, which may still become a
        character, and of whose tokens alone the new stream has to know.

        Nothing, and no new stream, where that one begins inside a token.
        """
        text = self._decode(self._open)
        certain, rest = (text[:-1], "�") if text.endswith("�") else (text, "")
        for end in range(len(self._open), -1, -1):
            if (self._decode(self._open[:end]), self._decode(self._open[end:])) == (certain, rest):
                self._open = [token for token in self._open[end:] if self._decode([token])]
                self._stream = DecodeStream(skip_special_tokens=True)
                for token in self._open:
                    self._stream.step(self._tokenizer, token)
                return certain
        return ""

    def finish(self) -> str:
        """What is left when a choice ends by itself: text held back, and the rest of an unfinished character (as �)."""
        if self.stopped is not None:
            return ""
        return self._release(self._decode(self._ids)[self._decoded :], last=True)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

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
