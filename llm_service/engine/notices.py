"""Events of requests other than tokens, collected until the engine's loop sends them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from llm_service.engine.messages import Complete, Failed, Pooled, PromptLogprobs, RowsNeeded, Token


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step's result tells the callers, in order."""

    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Logprobs that have become known of prompts."""
    pooled: list[Pooled] = field(default_factory=list)
    """Embedding requests that have ended."""
    tokens: list[Token] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Notices:
    """The events of requests since the last call, in the order in which callers are told; nothing follows a request's
    release."""

    rows_read: list[int]
    """Requests whose rows have been read by steps that are over."""
    complete: list[Complete]
    """Choices that were complete on arrival."""
    failed: list[Failed]
    """Requests that failed; they are released as well."""
    rows_needed: list[RowsNeeded]
    """Requests that ask for their items again. No step reads their rows, not even one under way."""
    released: list[int]
    """Requests that are gone. No step, not even one under way, reads their rows any more."""


class NoticeQueue:
    """Collects notices. Those about rows are held back until every step that may read the rows is over: each has the
    number of steps planned before it."""

    def __init__(self) -> None:
        self._complete: list[Complete] = []
        self._failed: list[Failed] = []
        self._rows_read: deque[tuple[int, int]] = deque()
        self._rows_needed: deque[tuple[int, int]] = deque()
        self._released: deque[tuple[int, int]] = deque()

    def complete(self, complete: Complete) -> None:
        """A choice was complete on arrival."""
        self._complete.append(complete)

    def failed(self, failed: Failed) -> None:
        """A request has failed."""
        self._failed.append(failed)

    def rows_read(self, id: int, planned_steps: int) -> None:
        """The steps planned so far read all rows of a request."""
        self._rows_read.append((planned_steps, id))

    def rows_needed(self, id: int, planned_steps: int) -> None:
        """A request needs its rows once more."""
        self._rows_needed.append((planned_steps, id))

    def released(self, id: int, planned_steps: int) -> None:
        """A request has ended."""
        self._released.append((planned_steps, id))

    def take(self, finished_steps: int) -> Notices:
        """All notices that are due after so many finished steps, each once."""
        complete, self._complete = self._complete, []
        failed, self._failed = self._failed, []
        read, needed, released = (
            _due(each, finished_steps) for each in (self._rows_read, self._rows_needed, self._released)
        )
        return Notices(read, complete, failed, [RowsNeeded(id) for id in needed], released)


def _due(waiting: deque[tuple[int, int]], finished_steps: int) -> list[int]:
    """Removes and returns the requests whose steps are over."""
    found: list[int] = []
    while waiting and waiting[0][0] <= finished_steps:
        found.append(waiting.popleft()[1])
    return found
