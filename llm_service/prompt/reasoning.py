"""Counts the tokens of an answer that are the model's reasoning."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Final

from llm_service.prompt.detokenizer import TokenTexts
from llm_service.prompt.output_marks import CALL, ToolFormat

_LONGEST_SIGN: Final = 512
"""Bytes of the sign of a call, at most: its mark, white space, and a function's name."""
_MARKS: Final = {
    ToolFormat.KIMI: "<|tool_calls_section_begin|>",
    ToolFormat.GEMMA: "<|tool_call>",
    ToolFormat.APERTUS: "<|tools_prefix|>",
}
"""Marks of calls that always end reasoning."""


class CallSign:
    """The start of a call that ends reasoning without an end mark: its `mark`, or that of an offered function."""

    def __init__(self, mark: str, behind: str = "") -> None:
        self.mark = mark.encode()
        self.pattern = re.compile(re.escape(self.mark) + behind.encode())

    @classmethod
    def of(cls, form: ToolFormat | None, names: Sequence[str]) -> CallSign | None:
        """The sign for models with this format that are offered these functions; None if no call ends reasoning."""
        if not names or form is None:
            return None
        if form in _MARKS:
            return cls(_MARKS[form])
        own = {ToolFormat.JSON: "", ToolFormat.XML: "<function={}>", ToolFormat.GLM: r"{}\s*<"}.get(form)
        if own is None:
            return None
        name = f"(?:{'|'.join(map(re.escape, names))})"
        ways = [rf'\{{\s*"name"\s*:\s*"{name}"', *([own.format(name)] if own else [])]
        return cls(CALL[0], rf"\s*(?:{'|'.join(ways)})")


class ReasoningCounter:
    """Counts the reasoning of one choice: `tokens` includes its marks and the token that ends it. The answer begins
    inside reasoning if the prompt ends there (`thinking`); otherwise there is reasoning if the model opens it before
    anything else. A `call` ends it as well, and is not counted.

    `marks` may each be one token or several; the text decides.
    """

    def __init__(
        self, texts: TokenTexts, marks: tuple[str, str], *, thinking: bool, call: CallSign | None = None
    ) -> None:
        self._texts = texts
        self._call = call
        self._recent: deque[int] = deque()  # bytes of the last tokens
        self._tail = b""  # the text of these tokens
        self._said = b""
        self._begin, self._end = marks
        self._opened = thinking
        self._pushed = 0
        self._over = False
        self.tokens = 0

    def push(self, token: int) -> None:
        """Takes the answer's next token."""
        if self._over:
            return
        self._pushed += 1
        self._said += self._texts.bytes_of(token)
        if not self._opened:
            self._look_for_beginning()
        if self._opened:
            self.tokens = self._pushed
            self._over = self._end.encode() in self._said
            self._said = self._said[-len(self._end) :]
            if self._call and not self._over:
                self._look_for_call(self._call, self._texts.bytes_of(token))

    def _look_for_call(self, call: CallSign, text: bytes) -> None:
        self._recent.append(len(text))
        self._tail += text
        while len(self._tail) - self._recent[0] > _LONGEST_SIGN:
            self._tail = self._tail[self._recent.popleft() :]
        if call.mark in self._tail and (begun := call.pattern.search(self._tail)):
            self._over = True
            before = sum(1 for _ in takewhile(lambda end: end <= begun.start(), accumulate(self._recent)))
            self.tokens -= len(self._recent) - before

    def _look_for_beginning(self) -> None:
        said = self._said.decode(errors="replace").lstrip()
        if said.startswith(self._begin):
            self._opened, self._said = True, said[len(self._begin) :].encode()
        else:
            self._said = said.encode()  # without leading white space, which may be of any length
            self._over = not self._begin.startswith(said)
