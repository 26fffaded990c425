"""Which engine gets which request: requests move from an engine that has ended to the next, until one is found to kill
engines. The end of an engine is charged to the requests that it had begun. A request that was there at two ends is a
*suspect*; suspects are tried one at a time, and an end meanwhile is charged to that suspect alone:
docs/design/failures.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from common.errors import DeadlineExceeded, TwinlensError, Unavailable
from llm_service.engine.messages import Token
from llm_service.engine_client.engine_request import EngineRequest, Event

_SUSPECT = 2
"""Ends of engines after which a request is a suspect. One may be chance."""


def engine_lost() -> Unavailable:
    """The error of requests that cannot continue."""
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
        """Raises Unavailable for a new request if no engine serves or is about to, or the request does not wait for
        one."""
        if not self._serves and (not max_handovers or self._seconds_left() <= 0):
            raise Unavailable("the engine is starting", reason="ENGINE_UNAVAILABLE")

    def enter(self, request: EngineRequest) -> None:
        """A new request. Raises as `check`."""
        self.check(request.max_handovers)
        if not self._serves:
            self._limit(request, self._seconds_left())
        self._requests[request.id] = request

    def sendable(self) -> list[EngineRequest]:
        """The requests to send to the engine, if it serves, in order of arrival; they count as sent from now on."""
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
        """Passes an event of the engine to a request; `at` is when a step had the token. Returns whether another
        request may be sent now."""
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
        """The engine has ended: requests that may wait for the next engine. Returns how many there are."""
        held = [request for request in self if request.held]
        waiting = [request for request in self if not request.held]
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
                if request.deaths >= _SUSPECT:  # a request on trial must not wait for room that other requests hold
                    request.ask_for_places()
        for request in waiting:
            self._limit(request, self._seconds_left())
        return len(self._requests)

    def close(self) -> None:
        """There will be no other engine."""
        for request in self:
            self.give_up(request, engine_lost())

    def _seconds_left(self) -> float:
        """How much longer requests wait for an engine after one has ended."""
        return 0.0 if self._lost_at is None else self._lost_at + self._seconds - time.monotonic()

    def _limit(self, request: EngineRequest, seconds: float | None) -> None:
        """Bounds the waiting of a request by its deadline, and by `seconds` (None: by its deadline alone). An engine
        that has the request checks the deadline itself."""
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
        """Tokens of a suspect after which the step that an engine died in is passed. Tokens of the step before may not
        have been reported (that step was launched before they were) and are computed again."""
        return (self._tokens_per_step + 1) * request.add.sampling.n

    def _end_trial(self, request: EngineRequest) -> bool:
        if request is not self._on_trial:
            return False
        self._on_trial = None
        return True
