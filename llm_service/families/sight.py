"""Which tokens of a sequence a token sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class SpanRule(Enum):
    """In which layers the tokens of a run of media rows see each other, within a window or beyond it; or that all
    tokens of a prompt do, in all layers and whatever the window; or all its media rows and the marks around them."""

    NOWHERE = "nowhere"
    EVERYWHERE = "everywhere"
    IN_WINDOWS = "in layers with a window"
    BEYOND_WINDOWS = "everywhere, and beyond windows"
    WHOLE_PROMPTS = "whole prompts"
    ALL_MEDIA = "all media of a prompt"


OF_PROMPTS = (SpanRule.WHOLE_PROMPTS, SpanRule.ALL_MEDIA)
"""Rules by which prompt tokens depend on tokens behind their own run."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Which tokens a token sees in one layer: a `window` of tokens including itself, 0: all before it. With an
    `answer_window`, a token of the answer sees all of the prompt and so many tokens of the answer, itself included.
    With a `chunk`, sequences are cut into chunks of so many tokens, and tokens of earlier chunks are not seen. `spans`
    says in which cases tokens of a span see later ones here; `IN_WINDOWS` only occurs with a window."""

    window: int = 0
    answer_window: int = 0
    chunk: int = 0
    spans: SpanRule = SpanRule.NOWHERE

    @property
    def is_local(self) -> bool:
        """Whether a token may see less than all that is before it."""
        return self.reach + self.chunk > 0

    @property
    def reach(self) -> int:
        """How many tokens a token of an answer sees at least, itself included; 0: all. With an `answer_window` it sees
        the prompt besides."""
        return self.window or self.answer_window

    def with_spans(self, rule: SpanRule) -> Sight:
        """The same in a model with that rule.

        >>> Sight().with_spans(SpanRule.IN_WINDOWS).spans, Sight(window=4).with_spans(SpanRule.IN_WINDOWS).spans
        (<SpanRule.NOWHERE: 'nowhere'>, <SpanRule.IN_WINDOWS: 'in layers with a window'>)
        """
        nowhere = rule is SpanRule.IN_WINDOWS and not self.window
        return replace(self, spans=SpanRule.NOWHERE if nowhere else rule)


ALL_BEFORE = Sight()
"""Each token sees all that is before it."""
