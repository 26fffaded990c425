"""Where a prompt may be cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_service.families.sight import OF_PROMPTS, SpanRule


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """Follows from which later tokens a token sees (`spans`). `media_tokens` are the tokens of media and the marks
    around them, if only these see each other within a prompt."""

    spans: SpanRule = SpanRule.NOWHERE
    media_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, spans: SpanRule, together: Sequence[int]) -> ChunkRule:
        """The rule of a model whose media tokens are `together`; they are stated whether they see each other or not."""
        return cls(spans, tuple(together) if spans is SpanRule.ALL_MEDIA else ())

    @property
    def may_end_in_run(self) -> bool:
        """Whether a chunk may end within a run of media rows."""
        return self.spans is SpanRule.NOWHERE

    @property
    def may_begin_in_run(self) -> bool:
        """Whether a chunk may begin inside a run of media rows, behind cached blocks: not if rows see all of their
        run."""
        return self.spans is not SpanRule.BEYOND_WINDOWS

    @property
    def of_prompts(self) -> bool:
        """Whether what is computed for a prompt's beginning depends on more than the run that it ends in."""
        return self.spans in OF_PROMPTS

    def whole_end(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's first tokens are computed at once, since they see each other; 0: none need be.

        >>> ChunkRule(SpanRule.WHOLE_PROMPTS).whole_end([1, 7, 2]), ChunkRule(SpanRule.EVERYWHERE).whole_end([1, 7, 2])
        (3, 0)
        >>> ChunkRule(SpanRule.ALL_MEDIA, (7, 8)).whole_end([1, 7, 8, 2])
        3
        """
        if not self.of_prompts:
            return 0
        if not self.media_tokens:
            return len(tokens)
        found = np.flatnonzero(np.isin(tokens, self.media_tokens))
        return int(found[-1]) + 1 if len(found) else 0


ANYWHERE = ChunkRule()
"""Prompts may be cut anywhere."""
