"""How large steps may be, once the device had too little memory for one."""

from __future__ import annotations

from dataclasses import replace

from llm_service.engine.limits import SchedulerLimits

_PATIENCE = 256
"""Steps that must succeed before larger ones are tried."""


class StepCap:
    """Halves the limits of steps when one runs out of memory, and doubles them again after a number of steps that
    succeed, which doubles with each further failure. If prompts or runs of rows are computed whole, steps always have
    room for these, and fewer sequences share a step."""

    def __init__(self, limits: SchedulerLimits, patience: int = _PATIENCE) -> None:
        self._whole = limits
        self.limits = limits
        """The limits of the next step."""
        self._cuts_tokens = limits.chunk_rule.may_end_in_run and not limits.chunk_rule.of_prompts
        self._patience, self._good = patience, 0

    def failed(self, tokens: int, sequences: int) -> bool:
        """A step of so many tokens and sequences ran out of memory. Returns False if no step can be smaller."""
        size = tokens if self._cuts_tokens else sequences
        if size <= 1:
            return False
        self._bound(size // 2)
        self._patience, self._good = 2 * self._patience, 0
        return True

    def succeeded(self) -> bool:
        """A step did; whether the next ones may be larger."""
        if self.limits is self._whole:
            return False
        self._good += 1
        if self._good < self._patience:
            return False
        self._good = 0
        self._bound(2 * (self.limits.max_step_tokens if self._cuts_tokens else self.limits.max_running))
        return True

    def _bound(self, size: int) -> None:
        whole = self._whole
        if size >= (whole.max_step_tokens if self._cuts_tokens else whole.max_running):
            self.limits = whole
            return
        tokens = size if self._cuts_tokens else whole.max_step_tokens
        self.limits = replace(whole, max_step_tokens=tokens, max_running=min(whole.max_running, size))
