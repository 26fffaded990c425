"""Which requests go to which engine: from one that has ended to the next, until one of them is found to be deadly. An
end is charged to the requests that the engine had begun on. Who was there at two ends is a *suspect*; suspects are
tried one after the other, and an end meanwhile is charged to that one alone: docs/design/failures.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from common.errors import DeadlineExceeded, TwinlensError, Unavailable
from llm_service.engine.messages import Token
from llm_service.engine_client.engine_request import EngineRequest, Event

_SUSPECT = 2
"""Ends of engines. One is chance; at the second one all that were there twice are looked at one by one."""


def engine_lost() -> Unavailable:
    """What callers get whose request cannot go on."""
    return Unavailable("the engine has ended and is being restarted", reason="ENGINE_UNAVAILABLE")


class Handover:
    """Every request that has not been let go of. While no engine serves they wait, for `seconds` at most. A step gives
    a choice `tokens_per_step` at most."""

    def __init__(self, seconds: float, tokens_per_step: int) -> None:
        self._seconds = seconds
        self._tokens_per_step = tokens_per_step
        self._requests: dict[int, EngineRequest] = {}
        self._on_trial: EngineRequest | None = None
        self._trial_tokens = 0
        self._serves = False
        self._lost_at: float | None = None
        self.handed_over = 0

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(tuple(self._requests.values()))

    def get(self, id: int) -> EngineRequest | None:
        """The request of this number, if it has not been let go of."""
        return self._requests.get(id)

    @property
    def held(self) -> int:
        """Requests that the engine has."""
        return sum(request.held for request in self._requests.values())

    def check(self, max_handovers: int) -> None:
        """Raises Unavailable for a new request where no engine serves and none is about to, or it does not want to wait
        for one."""
        if not self._serves and (not max_handovers or self._seconds_left() <= 0):
            raise Unavailable("the engine is starting", reason="ENGINE_UNAVAILABLE")

    def enter(self, request: EngineRequest) -> None:
        """A new request. Raises as `check`."""
        self.check(request.max_handovers)
        if not self._serves:
            self._limit(request, self._seconds_left())
        self._requests[request.id] = request

    def sendable(self) -> list[EngineRequest]:
        """The requests that the engine is to get now, if it serves, in the order in which they came; they count as held
        from now on."""
        if not self._serves:
            return []
        chosen: list[EngineRequest] = []
        waiting = [request for request in self._requests.values() if not request.held]
        for request in waiting:
            if request.over or request.waits_for_places:
                continue
            if request.deaths >= _SUSPECT:
                if self._on_trial is not None:
                    continue  # until that one is past the step that an engine died over
                self._on_trial, self._trial_tokens = request, self._tokens_to_pass(request)
            chosen.append(request)
            request.held = True
            self.handed_over += request.deaths > 0
        for request in waiting:
            self._limit(request, None)
        return chosen

    def deliver(self, request: EngineRequest, event: Event, at: float) -> bool:
        """Passes on what the engine says of a request, of a token when a step had it; whether another one may be sent
        now."""
        request.put(event, at)
        if request is not self._on_trial or not isinstance(event, Token):
            return False
        self._trial_tokens -= 1
        return self._trial_tokens == 0 and self._end_trial(request)

    def let_go(self, id: int) -> bool:
        """No engine reads anything of a request any more; whether another one may be sent now."""
        request = self._requests.pop(id, None)
        if request is None:
            return False
        request.held = False
        if request.timer is not None:
            request.timer.cancel()
        request.holder.released()
        return self._end_trial(request)

    def engine_serves(self) -> None:
        """The engine can be given requests."""
        self._serves, self._lost_at = True, None

    def engine_ended(self) -> int:
        """The engine has ended: whoever may waits for the next one; how many those are."""
        held = [request for request in self if request.held]
        charged = [request for request in held if request.begun] or held
        if self._on_trial in charged:
            charged = [self._on_trial]
        self._on_trial, self._serves = None, False
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        for request in charged:
            request.deaths += 1
        for request in held:
            request.lose_engine()
            if request.over:
                self.let_go(request.id)
            elif not request.max_handovers or request.deaths > request.max_handovers:
                self.give_up(request, engine_lost())
            else:
                self._limit(request, self._seconds_left())
                if request.deaths >= _SUSPECT:  # on trial, it may not wait for room that those have who wait for it
                    request.ask_for_places()
        return len(self._requests)

    def close(self) -> None:
        """There will be no other engine."""
        for request in self:
            self.give_up(request, engine_lost())

    def _seconds_left(self) -> float:
        """How much longer it is waited for an engine, where one has ended."""
        return 0.0 if self._lost_at is None else self._lost_at + self._seconds - time.monotonic()

    def _limit(self, request: EngineRequest, seconds: float | None) -> None:
        """An engine that has a request minds its deadline; for one that waits it is done here, and for no longer than
        so many seconds (None: no bound but the deadline)."""
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if request.held:
            return
        limits: list[tuple[float, TwinlensError]] = []
        if request.add.deadline is not None:
            left = request.add.deadline - time.monotonic()
            limits.append((left, DeadlineExceeded("the deadline passed while the engine was being restarted")))
        if seconds is not None:
            limits.append((seconds, engine_lost()))
        if limits:
            left, error = min(limits, key=lambda limit: limit[0])
            loop = asyncio.get_running_loop()
            request.timer = loop.call_later(max(0.0, left), self.give_up, request, error)

    def give_up(self, request: EngineRequest, error: TwinlensError) -> None:
        """Ends a request that no engine has."""
        request.fail(error)
        self.let_go(request.id)

    def _tokens_to_pass(self, request: EngineRequest) -> int:
        """Tokens of a suspect after which the step that an engine died over lies behind it. The tokens of the step
        before may never have been heard of (that one was launched before they were told) and are computed again."""
        return (self._tokens_per_step + 1) * request.add.sampling.n

    def _end_trial(self, request: EngineRequest) -> bool:
        if request is not self._on_trial:
            return False
        self._on_trial = None
        return True
