"""The limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from llm_service.families.chunk_rule import ANYWHERE, ChunkRule


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one engine."""

    max_running: int
    """Most sequences that run at once."""
    max_step_tokens: int
    max_context: int
    """Tokens of a sequence, prompt and answer."""
    keep_media_whole: bool = False
    """No chunk ends inside a run of media rows that fits into a step beside all possible decodes."""
    early_tokens: int = 1
    """Fewest computable tokens for which a prompt continues while some of its rows are missing; 0: it waits for all
    rows."""
    chunk_rule: ChunkRule = ANYWHERE
    """Where a prompt may be cut. A prompt with a part that must be computed at once and does not fit into a step is
    refused."""
    forgets_answers: bool = False
    """Blocks of an answer are found by nothing but this answer."""
    speculative_tokens: int = 0
    """Drafts of a sequence that a step verifies."""
    draft_rows: int = 16
    """Most tokens of all decodes of a step if any of them has drafts."""
    decode_slowdown: float = 0.0
    """Bound on the time between a running answer's tokens while prompts are computed, relative to decodes alone; 0:
    none."""
    max_loras: int = 0
    """Most adapters whose sequences run at once."""
    proposes: bool = False
    """A model proposes drafts for the step after each one."""

    @property
    def max_media_tokens(self) -> int:
        """Rows of the longest run that fits into a step beside all possible decodes; drafts are left out if need be."""
        return self.max_step_tokens - self.max_running + 1

    @property
    def max_waiting_prompt_logprobs(self) -> int:
        """Most logprobs of one prompt that wait to be read: those of two steps, so that the prompt continues while they
        are read."""
        return 2 * self.max_step_tokens
