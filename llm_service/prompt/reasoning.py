"""Counts the tokens of an answer that are the model's reasoning."""

from __future__ import annotations

from llm_service.prompt.detokenizer import TokenTexts

THINK = ("<think>", "</think>")
"""What is around a model's reasoning: the chat template writes the first of them, or the model itself."""


class ReasoningCounter:
    """Counts for one choice: `tokens` are those of its reasoning, marks and the token that ends it included. Its answer
    begins inside of its reasoning where its prompt ends there (`thinking`); otherwise there is some where the model
    opens it before anything else.

    A mark may be one token or several; what counts is the text.
    """

    def __init__(self, texts: TokenTexts, *, thinking: bool) -> None:
        self._texts = texts
        self._said = b""
        self._mark = THINK[1] if thinking else THINK[0]
        self._pushed = 0
        self._over = False
        self.tokens = 0

    def push(self, token: int) -> None:
        """Takes the answer's next token."""
        if self._over:
            return
        self._pushed += 1
        self._said += self._texts.bytes_of(token)
        if self._mark == THINK[0]:
            self._look_for_beginning()
        if self._mark == THINK[1] and not self._over:
            self.tokens = self._pushed
            self._over = THINK[1].encode() in self._said
            self._said = self._said[-len(THINK[1]) :]

    def _look_for_beginning(self) -> None:
        said = self._said.decode(errors="replace").lstrip()
        if said.startswith(THINK[0]):
            self._mark, self._said = THINK[1], said[len(THINK[0]) :].encode()
        else:
            self._said = said.encode()  # without the white space before it: there may be any amount of that
            self._over = not THINK[0].startswith(said)
