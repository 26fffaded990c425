"""What a scheduler is held to."""

from __future__ import annotations

from dataclasses import dataclass

from llm_service.families.chunk_rule import ANYWHERE, ChunkRule


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one engine."""

    max_running: int
    """Sequences at once."""
    max_step_tokens: int
    max_context: int
    """Tokens of a sequence, prompt and answer."""
    keep_media_whole: bool = False
    """A chunk does not end inside a run of media rows that fits into a step beside all the decodes that there may
    be."""
    early_tokens: int = 1
    """A prompt whose rows are not all here goes on where at least so many tokens can be computed; 0: not before they
    are."""
    chunk_rule: ChunkRule = ANYWHERE
    """Where a prompt may be cut. One whose part that is computed at once does not fit into a step is refused."""
    forgets_answers: bool = False
    """Blocks of an answer are found by nothing but this answer."""
    speculative_tokens: int = 0
    """Drafts of a sequence that a step verifies."""
    draft_rows: int = 16
    """Most tokens of a step's decodes together, where any of them has drafts."""
    decode_slowdown: float = 0.0
    """How many times as far apart as alone a running answer's tokens come while prompts are computed; 0: as far as that
    makes them."""
    max_loras: int = 0
    """Adapters whose sequences run at once."""
    proposes: bool = False
    """A model proposes drafts for the step after each one."""

    @property
    def max_media_tokens(self) -> int:
        """Rows of the longest run that fits into a step beside all the decodes that there may be; drafts make way."""
        return self.max_step_tokens - self.max_running + 1

    @property
    def max_waiting_prompt_logprobs(self) -> int:
        """Logprobs of one prompt that may wait for its caller: twice what a step may give, so that one goes on while
        they are taken."""
        return 2 * self.max_step_tokens
