"""What a token of a sequence sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class SpanRule(Enum):
    """In which layers the tokens of a run of media rows see each other, as far as a window reaches, or beyond; or that
    those of a whole prompt do, in all layers and whatever the window, or of these all rows and the marks around
    them."""

    NOWHERE = "nowhere"
    EVERYWHERE = "everywhere"
    IN_WINDOWS = "in layers with a window"
    BEYOND_WINDOWS = "everywhere, and beyond windows"
    WHOLE_PROMPTS = "whole prompts"
    ALL_MEDIA = "all media of a prompt"


OF_PROMPTS = (SpanRule.WHOLE_PROMPTS, SpanRule.ALL_MEDIA)
"""Rules by which what is computed of a prompt's tokens depends on what stands further behind than their run."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a token sees in one layer: `window` tokens, itself among them, 0: all before it. Where there is an
    `answer_window`, one of an answer sees all of the prompt, and so many tokens of the answer, itself among them. With
    a `chunk` sequences are cut into chunks of so many tokens, and none before its own is seen. `spans`: by which rule
    tokens of a span see those behind them here; `IN_WINDOWS` is said where there is a window alone."""

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
        """How many tokens one of an answer sees at the least, itself among them, 0: all. With an `answer_window` it
        sees the prompt besides."""
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
