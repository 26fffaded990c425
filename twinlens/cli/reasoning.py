"""Separates a model's reasoning from its answer, as text arrives."""

from __future__ import annotations

THINK = ("<think>", "</think>")
"""The marks around reasoning, if the service does not tell them."""


class ReasoningSplitter:
    """Splits one text, of which each piece has any length. `marks` are around the reasoning, None: there is none that
    is told apart; `thinking`: the text begins inside of it.

    >>> splitter = ReasoningSplitter(thinking=False)
    >>> [splitter.feed(piece) for piece in ("<thi", "nk>\\nHm.</th", "ink>\\n\\nYes", ".")]
    [('', ''), ('Hm.', ''), ('', 'Yes'), ('', '.')]
    >>> ReasoningSplitter(None, thinking=False).feed("<think>Hm.")
    ('', '<think>Hm.')
    """

    def __init__(self, marks: tuple[str, str] | None = THINK, *, thinking: bool) -> None:
        self._begin, self._end = marks or THINK
        self._held = ""
        self._state = "answering" if marks is None else "thinking" if thinking else "beginning"
        self._trim = thinking
        """The white space that comes next belongs to the marks."""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that this text completes."""
        return self._split(text, last=False)

    def end(self) -> tuple[str, str]:
        """What is left at the end."""
        return self._split("", last=True)

    def _split(self, text: str, *, last: bool) -> tuple[str, str]:
        self._held += text
        if self._state == "beginning":
            said = self._held.lstrip()
            if self._begin.startswith(said) and not last:
                return "", ""
            if said.startswith(self._begin):
                self._held, self._state, self._trim = said[len(self._begin) :], "thinking", True
            else:
                self._state = "answering"
        thought = ""
        if self._state == "thinking":
            thought, found = self._thought(last=last)
            if not found:
                return thought, ""
            self._state, self._trim = "answering", True
        return thought, self._taken(len(self._held))

    def _thought(self, *, last: bool) -> tuple[str, bool]:
        """More of the reasoning, and whether that was its end; white space before a mark is held back with it."""
        before, mark, rest = self._held.partition(self._end)
        if mark:
            self._held = before.rstrip()
            thought = self._taken(len(self._held))
            self._held = rest
            return thought, True
        sizes = range(min(len(self._end) - 1, len(before)), 0, -1)
        part = 0 if last else next((size for size in sizes if before.endswith(self._end[:size])), 0)
        return self._taken(len(before[: len(before) - part].rstrip())), False

    def _taken(self, count: int) -> str:
        """The first so many characters of what is held."""
        taken, self._held = self._held[:count], self._held[count:]
        if self._trim:
            taken = taken.lstrip()
            self._trim = not taken
        return taken
