"""The stages of a request: how long each took, in sequence and in parallel."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from common.telemetry import tracing
from common.telemetry.stages import Stage, add, seconds_of
from llm_service.engine.messages import Prefilled


@dataclass(slots=True)
class Stages:
    """Stages of a request, each measured from the end of the one before; `beside` are stages in parallel with these."""

    in_turn: dict[str, Stage] = field(default_factory=dict)
    beside: dict[str, Stage] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)
    _last: float = 0.0
    _prefilled: float = 0.0

    @property
    def all(self) -> dict[str, Stage]:
        """All stages, by name."""
        return self.in_turn | self.beside

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of all stages, by name."""
        return seconds_of(self.all)

    def prefilled(self, chunk: Prefilled) -> None:
        """A step has computed something of the prompt; its time counts once, however many choices it was for."""
        about = {"choice": chunk.choice, "first_token": chunk.first, "tokens": chunk.count}
        tracing.record([("prefill", chunk.began, chunk.ended)], **about)
        if chunk.began >= self._prefilled:
            add(self.beside, "prefill", Stage.between(chunk.began, chunk.ended))
            self._prefilled = chunk.ended

    def mark(self, stage: str) -> None:
        """Ends a stage now; only the first time counts."""
        if stage not in self.in_turn:
            self.extend(stage)

    def extend(self, stage: str) -> None:
        """Ends a stage now; if it was the last one to end, it is extended until now."""
        now = time.perf_counter()
        add(self.in_turn, stage, Stage.between(self._last or self.begun, now))
        self._last = now
