"""A request under way, as `Abort`, the bounds on what may wait, and the metrics see it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from common import tracing
from common.errors import Cancelled
from llm_service.engine.messages import Prefilled
from llm_service.engine.ticket import Ticket
from llm_service.generation.admission import AdmissionTicket
from llm_service.generation.events import Begun, Delta, Ended, Event
from llm_service.meters import RequestMeter


@dataclass(slots=True)
class Stages:
    """Seconds by stage, each from the end of the one before; `beside` are those of what goes on meanwhile."""

    seconds: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)
    _last: float = 0.0
    _prefilled: float = 0.0

    @property
    def all(self) -> dict[str, float]:
        """Every stage there is."""
        return self.seconds | self.beside

    def prefilled(self, chunk: Prefilled) -> None:
        """A step has computed something of the prompt; its time counts once, however many choices it was for."""
        about = {"choice": chunk.choice, "first_token": chunk.first, "tokens": chunk.count}
        tracing.record([("prefill", chunk.began, chunk.ended)], **about)
        if chunk.began >= self._prefilled:
            self.beside["prefill"] = self.beside.get("prefill", 0.0) + chunk.ended - chunk.began
            self._prefilled = chunk.ended

    def mark(self, stage: str) -> None:
        """Ends a stage now; only the first time counts."""
        if stage not in self.seconds:
            self.extend(stage)

    def extend(self, stage: str) -> None:
        """Ends a stage now; where it is the last one that was ended, it has gone on until now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - (self._last or self.begun)
        self._last = now


@dataclass(slots=True, eq=False)
class Job:
    """A request under way: the task that serves it, its tenant's salt and, as soon as the engine has it, its ticket."""

    task: asyncio.Task[object] | None
    admission: AdmissionTicket
    salt: str = ""
    ticket: Ticket | None = None
    aborted: bool = False
    stages: Stages = field(default_factory=Stages)

    def see(self, event: Event, meter: RequestMeter) -> None:
        """Takes note of what is told to the caller."""
        match event:
            case Begun():
                self.admission.start()
                meter.prompt(len(event.layout.ids))
            case Delta():
                meter.token(event.choice)
            case Ended():
                meter.choice(event.reason, event.completion_tokens)

    def abort(self) -> None:
        """Ends the request inside the generator, which then says why; cancelled in the middle of a message to its
        caller, it could not. Before the engine has the request nothing is written, and the task is cancelled."""
        if self.ticket is not None:
            self.ticket.fail(aborted())
        elif self.task is not None and not self.aborted:
            self.task.cancel()
        self.aborted = True


def aborted() -> Cancelled:
    """What its caller gets."""
    return Cancelled("the request was aborted", reason="ABORTED")
