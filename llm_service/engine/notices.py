"""What callers have to be told of their requests beside tokens, collected until the loop sends it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from llm_service.engine.messages import Complete, Failed, Pooled, PromptLogprobs, RowsNeeded, Token


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the result of a step says to callers, in the order in which they are told."""

    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Logprobs that have become known of prompts."""
    pooled: list[Pooled] = field(default_factory=list)
    """Requests that are embedded, and ended by that."""
    tokens: list[Token] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Notices:
    """What has come of requests since the last ones, in the order in which callers are told: nothing is heard of a
    request once it is released."""

    rows_read: list[int]
    """Requests whose rows have been read: the steps that do so are over."""
    complete: list[Complete]
    """Choices that were complete when they came."""
    failed: list[Failed]
    """Requests that failed; they are released as well."""
    rows_needed: list[RowsNeeded]
    """Requests that ask for their items anew. No step, not even one under way, reads their rows."""
    released: list[int]
    """Requests that are gone. No step, not even one under way, reads their rows any more."""


class NoticeQueue:
    """Collects notices. Those about rows are held back while a step is under way that may read them: each comes with
    the number of steps that had been planned by then."""

    def __init__(self) -> None:
        self._complete: list[Complete] = []
        self._failed: list[Failed] = []
        self._rows_read: deque[tuple[int, int]] = deque()
        self._rows_needed: deque[tuple[int, int]] = deque()
        self._released: deque[tuple[int, int]] = deque()

    def complete(self, complete: Complete) -> None:
        """A choice was complete when it came."""
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
        """All that may be told when so many steps are finished, each once."""
        complete, self._complete = self._complete, []
        failed, self._failed = self._failed, []
        read, needed, released = (
            _due(each, finished_steps) for each in (self._rows_read, self._rows_needed, self._released)
        )
        return Notices(read, complete, failed, [RowsNeeded(id) for id in needed], released)


def _due(waiting: deque[tuple[int, int]], finished_steps: int) -> list[int]:
    """Takes the requests whose steps are over."""
    found: list[int] = []
    while waiting and waiting[0][0] <= finished_steps:
        found.append(waiting.popleft()[1])
    return found
