"""Counts the tokens of an answer that are the model's reasoning."""

from __future__ import annotations

from llm_service.prompt.detokenizer import TokenTexts


class ReasoningCounter:
    """Counts for one choice: `tokens` are those of its reasoning, marks and the token that ends it included. Its answer
    begins inside of its reasoning where its prompt ends there (`thinking`); otherwise there is some where the model
    opens it before anything else.

    The `marks` around it may each be one token or several; what counts is the text.
    """

    def __init__(self, texts: TokenTexts, marks: tuple[str, str], *, thinking: bool) -> None:
        self._texts = texts
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

    def _look_for_beginning(self) -> None:
        said = self._said.decode(errors="replace").lstrip()
        if said.startswith(self._begin):
            self._opened, self._said = True, said[len(self._begin) :].encode()
        else:
            self._said = said.encode()  # without the white space before it: there may be any amount of that
            self._over = not self._begin.startswith(said)
