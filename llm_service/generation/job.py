"""A request in progress, as the generator keeps track of it, and how it is aborted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from common.errors import Cancelled
from common.rpc.deadlines import has_run_out
from common.telemetry import log
from common.telemetry.stages import seconds_of
from llm_service.engine_client.engine_request import EngineRequest
from llm_service.generation.admission import AdmissionTicket
from llm_service.generation.events import Begun, Delta, Ended, Event
from llm_service.generation.request_stages import Stages
from llm_service.meters import RequestMeter


@dataclass(slots=True, eq=False)
class Job:
    """A request in progress: its task, its tenant's salt, its `EngineRequest` once there is one, and how many tokens of
    each kind its caller was sent."""

    task: asyncio.Task[object] | None
    admission: AdmissionTicket
    salt: str = ""
    engine_request: EngineRequest | None = None
    aborted: bool = False
    stages: Stages = field(default_factory=Stages)
    tokens: Counter[str] = field(default_factory=Counter)

    def rows_came(self) -> None:
        """All rows of its media are here."""
        self.stages.mark("rows")
        self.admission.media_came()

    def see(self, event: Event, meter: RequestMeter) -> None:
        """Records an event that is sent to the caller."""
        match event:
            case Begun():
                self.admission.start()
                meter.prompt(len(event.layout.ids))
                self.tokens.update(prompt_tokens=len(event.layout.ids), cached_tokens=event.cached)
            case Delta():
                if self.engine_request is not None:
                    meter.tokens(event.choice, self.engine_request.take_times(event.choice, len(event.tokens)))
                self.tokens["completion_tokens"] += len(event.tokens)
            case Ended():
                meter.choice(event.reason, event.completion_tokens)

    def outcome_of_leaving(self, deadline: float | None) -> str:
        """The outcome of a request whose caller has stopped reading: failed if its deadline has passed, otherwise
        cancelled."""
        remaining = None if deadline is None else deadline - time.monotonic()
        late = not self.aborted and has_run_out(time.perf_counter() - self.stages.begun, remaining)
        return "failed" if late else "cancelled"

    def log(self) -> None:
        """Adds the number of tokens, and the seconds of each sequential stage, to the log line of its call."""
        seconds = {name: round(each, 4) for name, each in seconds_of(self.stages.in_turn).items()}
        log.bind(**self.tokens, stages=seconds)

    def abort(self) -> None:
        """Ends the request. Once the engine has it, the generator ends it and reports why, because a task cancelled in
        the middle of a message to its caller could not. Before that nothing is written, and the task is cancelled."""
        if self.engine_request is not None:
            self.engine_request.fail(aborted())
        elif self.task is not None and not self.aborted:
            self.task.cancel()
        self.aborted = True


def aborted() -> Cancelled:
    """The error of an aborted request."""
    return Cancelled("the request was aborted", reason="ABORTED")
