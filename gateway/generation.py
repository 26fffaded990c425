"""A request over LLM services: which of them gets it, and which one continues when a service ends during its answer."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast

import grpc

from common.errors import Cancelled, DeadlineExceeded, Exhausted, TwinlensError, Unavailable
from common.rpc.channel import is_cut_off
from common.rpc.request_budget import STATED
from common.telemetry import log, tracing
from gateway.prompt_turns import Patience
from gateway.request_context import RequestContext
from gateway.routing_key import key_of
from gateway.services import LlmService, LlmServices, Outgoing, connection_lost, error_of, may_fare_better
from twinlens.v1 import llm_pb2

_log = log.get("generation")

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 1.0
"""Seconds between looks for a service that can go on with an answer."""
_STOPPED = "CALL_ENDED"
"""The reason of a service that stops in order; requests are not to blame."""
_NOT_COMPILED = "BAD_STRUCTURE", "STRUCTURE_TOO_LARGE"

Outcome: TypeAlias = Literal["taken_over", "too_many", "not_kept", "no_service"]
Event: TypeAlias = llm_pb2.GenerateResponse


@dataclass(frozen=True, slots=True)
class HandoverLimits:
    """How many services may end under one answer and be followed by another; how long an answer waits for one that can
    go on with it; and how many bytes of requests are kept for that. `longest_seconds` bounds all of a request."""

    most: int
    seconds: float
    kept_bytes: int
    longest_seconds: float


class Generations:
    """Asks LLM services. `on_handover` gets the outcome of an interrupted answer, and its delay; `on_usage` the usage
    and the caller."""

    def __init__(
        self,
        services: LlmServices,
        limits: HandoverLimits,
        on_handover: Callable[[Outcome, float], None],
        on_usage: Callable[[str, llm_pb2.Usage], None],
    ) -> None:
        self.services: Final = services
        self.limits: Final = limits
        self.on_handover: Final = on_handover
        self.on_usage: Final = on_usage
        self.kept_bytes = 0
        """Bytes of requests that another service could continue."""

    async def events(
        self,
        request: llm_pb2.GenerateRequest,
        context: RequestContext,
        on_start: Callable[[], None] = lambda: None,
        *,
        otherwise: str = "",
    ) -> AsyncGenerator[Event]:
        """The events of a generation, as if one service had sent them. If a service cannot be reached before the first
        event, another one is asked; if it ends later, another one continues the answer. `on_start` is called with the
        first event, when the request no longer counts as the caller's body. If a schema of the answer is refused, the
        request is repeated with `otherwise`, if given. Closing the iterator cancels the call. Raises TwinlensError."""
        request.cache_salt = context.caller.salt(request.cache_salt)
        one = _Generation(self, request, await key_of(request), context, on_start, otherwise)
        del request
        service = one.first_service()
        try:
            while True:
                call = one.open(service)
                try:
                    while (event := await call.read()) is not grpc.aio.EOF:
                        if one.takes(service, cast(Event, event)):
                            yield one.answer.as_told(cast(Event, event))
                    return
                except grpc.aio.AioRpcError as error:
                    if one.answer.complete:
                        return
                    failure = error_of(error, begun=one.answer.begun)
                except asyncio.CancelledError:
                    if not is_cut_off(call):
                        raise
                    if one.answer.complete:
                        return
                    failure = connection_lost(begun=one.answer.begun)
                except _OtherAnswer as other:
                    failure = None
                    _log.info("a service does not continue an answer", address=service.address, cause=str(other))
                finally:
                    service.in_flight -= 1
                    call.cancel()
                service = await one.next_service(service, failure)
        finally:
            one.close()


class _OtherAnswer(Exception):
    """A service that was to go on has begun on another answer than the one before it; its text says why."""


@dataclass(slots=True)
class _Answer:
    """The answer so far, as another service needs it: the token ids of each unfinished choice."""

    n: int
    begun: bool = False
    handed_over: bool = False
    model: str = ""
    started: llm_pb2.GenerateStarted = field(default_factory=llm_pb2.GenerateStarted)
    tokens: dict[int, array[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    completed_tokens: int = 0
    computed: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing is missing but the end of the call."""
        return len(self.finished) == self.n

    @property
    def usage(self) -> llm_pb2.Usage | None:
        """Its usage so far; None while nothing is known to be computed."""
        if not self.computed:
            return None
        return llm_pb2.Usage(
            prompt_tokens=self.started.prompt_tokens,
            cached_tokens=self.started.cached_tokens,
            completion_tokens=self.completed_tokens + sum(map(len, self.tokens.values())),
        )

    def add(self, event: Event) -> None:
        """Takes an event of a service."""
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "delta":
                self.computed = True
                self.tokens.setdefault(event.delta.index, array("I")).extend(event.delta.token_ids)
            case "finished":
                self.computed = True
                self.completed_tokens += event.finished.usage.completion_tokens
                self.finished.add(event.finished.index)
                self.tokens.pop(event.finished.index, None)
            case _:  # an event of a newer service
                pass

    def as_told(self, event: Event) -> Event:
        """The event for the caller. Usage of the prompt is that of the first service."""
        if not self.handed_over or not event.HasField("finished"):
            return event
        told = Event(finished=event.finished)
        told.finished.usage.cached_tokens = self.started.cached_tokens
        return told

    def is_of(self, started: llm_pb2.GenerateStarted) -> bool:
        """Whether a service that is to continue has laid out the same prompt with the same media."""
        one, other = ((each.prompt_tokens, [span.key for span in each.spans]) for each in (self.started, started))
        return one == other

    def resumed(self) -> list[llm_pb2.ResumedChoice]:
        """For the service that goes on."""
        return [
            *(llm_pb2.ResumedChoice(index=index, finished=True) for index in sorted(self.finished)),
            *(llm_pb2.ResumedChoice(index=index, token_ids=ids) for index, ids in self.tokens.items()),
        ]


@dataclass(slots=True)
class _Pause:
    """An interrupted answer: why, where, since when, and until when a service is sought. `busy` services have refused
    it since the last attempt; after `delay` seconds they are asked again."""

    failure: TwinlensError
    address: str
    begun: float
    until: float
    busy: list[LlmService] = field(default_factory=list)
    delay: float = _FIRST_DELAY


class _Generation:
    """One request: its message, its answer so far, and the services it was sent to."""

    def __init__(
        self,
        owner: Generations,
        request: llm_pb2.GenerateRequest,
        key: bytes,
        context: RequestContext,
        on_start: Callable[[], None],
        otherwise: str,
    ) -> None:
        self._owner = owner
        self._services = owner.services
        self._request: llm_pb2.GenerateRequest | None = request
        self._key = key
        self._metadata = context.metadata
        self._caller = context.caller.name
        self._on_start = on_start
        self._otherwise = otherwise
        self._on_progress = context.gets_on
        self._deadline = time.perf_counter() + owner.limits.longest_seconds
        self._most = owner.limits.most
        if request.HasField("max_handovers"):
            self._most = min(self._most, request.max_handovers)
        self._size = 0  # bytes of the request as it was last sent
        self._kept = 0
        self._handovers = 0
        self._resumed = 0  # choices that the current service was told about
        self._gets_on = False  # whether anything came from the service that has it now
        self._offered: list[LlmService] = []  # before it began
        self._left: list[LlmService] = []  # services that failed it: others are preferred
        self._unfit: list[LlmService] = []  # services that cannot continue it
        self._pause: _Pause | None = None
        self._patience = Patience(context)
        self.answer = _Answer(max(1, request.sampling.n), model=request.model)

    def close(self) -> None:
        """Nothing is kept any more, and it costs nothing more."""
        self._owner.kept_bytes -= self._kept
        self._kept = 0
        if (usage := self.answer.usage) is not None:
            self._owner.on_usage(self._caller, usage)

    def first_service(self) -> LlmService:
        """The first service to ask. Raises TwinlensError if there is none."""
        return self._services.pick(self.answer.model, self._key)

    def open(self, service: LlmService) -> grpc.aio.UnaryStreamCall[Outgoing, Event]:
        """Calls a service, with the answer so far. Raises DeadlineExceeded."""
        assert self._request is not None
        seconds = self._deadline - time.perf_counter()
        if seconds <= 0:
            raise DeadlineExceeded("the request took too long")
        if self.answer.begun:
            self._request.model = self.answer.model
            if (left := self._most - self._handovers) == 0 or self._request.HasField("max_handovers"):
                self._request.max_handovers = left
            del self._request.resume[:]
            self._request.resume.extend(self.answer.resumed())
            self._resumed = len(self._request.resume)
        else:
            self._offered.append(service)
        outgoing = Outgoing(self._request)
        self._size = outgoing.size
        told = (*self._metadata, (STATED, str(outgoing.size)))
        call = service.channels.generate(outgoing, timeout=seconds, metadata=self._services.metadata_for(told))
        service.in_flight += 1
        log.bind(llm=service.address)
        return call

    def takes(self, service: LlmService, event: Event) -> bool:
        """Takes an event of a service; returns whether the caller gets it. Raises _OtherAnswer."""
        if not self.answer.begun:
            self.answer.begun = True
            self.answer.model = self.answer.model or service.model
            self._on_start()
            self._keep()
        elif self._pause is not None:
            if not self.answer.is_of(event.started):
                raise _OtherAnswer("OTHER_PROMPT")
            if event.started.resumed_choices != self._resumed:
                raise _OtherAnswer("BEGINS_ANEW")
            self._taken_over(self._pause, service)
            return False
        else:
            self._gets_on = True
        self.answer.add(event)
        if self.answer.computed:
            self._on_progress()
        return True

    def _keep(self) -> None:
        """Keeps the request for another service, if a handover is allowed and there is room."""
        assert self._request is not None
        if self._most and self._owner.kept_bytes + self._size <= self._owner.limits.kept_bytes:
            self._kept = self._size
            self._owner.kept_bytes += self._size
        else:
            self._request = None

    async def next_service(self, service: LlmService, failure: TwinlensError | None) -> LlmService:
        """The next service to ask, after this one has failed or has begun a different answer (no failure). Raises
        TwinlensError if there is none."""
        if self._pause is None:
            assert failure is not None
            if self._has_other_form(failure):
                self._offered.clear()
                return service
            if not self.answer.begun:
                try:
                    return self._services.elsewhere(failure, self.answer.model, self._key, self._offered)
                except TwinlensError as refusal:
                    await self._patience.wait(refusal)
                    self._offered.clear()
                    return self.first_service()
            self._pause = self._broken_off(service, failure)
        else:
            self._refused(self._pause, service, failure)
        if self._request is None:
            raise self._given_up(self._pause, "not_kept")
        if self._handovers > self._most:
            raise self._given_up(self._pause, "too_many")
        return await self._successor(self._pause)

    def _has_other_form(self, failure: TwinlensError) -> bool:
        """Whether it is asked for in another form than the one that cannot be compiled."""
        if self.answer.begun or failure.reason not in _NOT_COMPILED or not self._otherwise:
            return False
        assert self._request is not None
        self._request.sampling.json_schema, self._otherwise = self._otherwise, ""
        return True

    def _broken_off(self, service: LlmService, failure: TwinlensError) -> _Pause:
        """The answer is interrupted. Raises the failure if another service would not help, or is not wanted."""
        if not self._most or not isinstance(failure, Unavailable) or not may_fare_better(failure):
            raise failure
        self._left.append(service)
        if failure.reason != _STOPPED or not self._gets_on:
            self._handovers += 1
        now = time.perf_counter()
        return _Pause(failure, service.address, now, now + self._owner.limits.seconds)

    def _refused(self, pause: _Pause, service: LlmService, failure: TwinlensError | None) -> None:
        """A service that was to continue does not. Raises the failure if no service is to blame."""
        match failure:
            case DeadlineExceeded() | Cancelled():
                raise failure
            case Unavailable(reason="STREAM_INTERRUPTED"):  # the request may have killed it
                self._left.append(service)
                self._handovers += 1
            case Unavailable() if not may_fare_better(failure):
                raise failure
            case Unavailable() | Exhausted():
                pause.busy.append(service)
            case _:
                self._unfit.append(service)
                self._handovers += 1
        if failure:
            _log.info("a service does not continue an answer", address=service.address, reason=failure.reason)

    async def _successor(self, pause: _Pause) -> LlmService:
        """A service that can go on, as it has just said; it is waited for."""
        while True:
            fitting = self._services.fitting(self.answer.model, [*self._unfit, *pause.busy])
            if fitting:
                others = [service for service in fitting if service not in self._left]
                service = self._services.choose(self._key, others or fitting)
                if await self._services.confirm(service):
                    return service
            elif time.perf_counter() >= pause.until:
                raise self._given_up(pause, "no_service")
            else:
                # Many answers stop at once; they should not all ask again at once.
                await asyncio.sleep(pause.delay * random.uniform(0.5, 1.0))
                pause.delay = min(2 * pause.delay, _LONGEST_DELAY)
                pause.busy.clear()

    def _taken_over(self, pause: _Pause, service: LlmService) -> None:
        self._pause, self._gets_on, self.answer.handed_over = None, False, True
        now = time.perf_counter()
        self._owner.on_handover("taken_over", now - pause.begun)
        tracing.record([("handover", pause.begun, now)], left=pause.address, to=service.address)
        _log.warning(
            "an answer continues elsewhere",
            left=pause.address,
            reason=pause.failure.reason,
            to=service.address,
            tokens=sum(map(len, self.answer.tokens.values())),
            seconds=round(now - pause.begun, 3),
        )

    def _given_up(self, pause: _Pause, outcome: Outcome) -> TwinlensError:
        """The error that the answer ends with: why it was interrupted."""
        seconds = time.perf_counter() - pause.begun
        self._owner.on_handover(outcome, seconds)
        _log.warning(
            "an answer cannot be continued",
            left=pause.address,
            reason=pause.failure.reason,
            outcome=outcome,
            seconds=round(seconds, 3),
        )
        return pause.failure
