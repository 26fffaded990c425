"""The LLM services that requests are handed to: which there are, which can serve, and one call to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc

from common import log, tasks
from common.errors import DeadlineExceeded, NotFound, TwinlensError, Unauthenticated, Unavailable
from common.grpc_channel import ChannelSecurity, from_rpc_error, is_of_the_link, is_too_large, open_channel
from common.request_budget import STATED
from gateway.errors import TooLarge, param_of
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_log = log.get("services")
_WATCH_SECONDS = 1.0
"""From one look at a service to the next."""
_ANSWER_SECONDS = 5.0
"""The longest that a service may take to say what it is; and for any other short call."""
_ATTEMPTS = 3
"""Services that one request is offered to."""

Metadata = Sequence[tuple[str, str]]


@dataclass(eq=False, slots=True)
class LlmService:
    """One LLM service. `info` is what it last said of itself, None while it cannot serve."""

    address: str
    channel: grpc.aio.Channel
    stub: LlmServiceAsyncStub
    info: llm_pb2.LlmServiceGetInfoResponse | None = None
    in_flight: int = 0
    watcher: asyncio.Task[None] | None = field(default=None)

    async def look(self, metadata: Metadata) -> None:
        """Asks it what it is. It serves once its engine has said how long a context it has memory for."""
        try:
            info = await self.stub.GetInfo(
                llm_pb2.LlmServiceGetInfoRequest(), timeout=_ANSWER_SECONDS, metadata=tuple(metadata)
            )
        except grpc.aio.AioRpcError as error:
            now, cause = None, error.code().name
        else:
            now, cause = (info, "") if info.context_tokens else (None, "STARTING")
        if (now is None) != (self.info is None):
            said = "an LLM service can be used" if now else "an LLM service cannot be used"
            _log.info(said, address=self.address, cause=cause)
        self.info = now


class LlmServices:
    """All LLM services of one gateway."""

    def __init__(self, addresses: Sequence[str], security: ChannelSecurity) -> None:
        self._security = security
        self._changed = asyncio.Event()
        self.services = [self._open(address) for address in addresses]

    def _open(self, address: str) -> LlmService:
        channel = open_channel(address, self._security)
        return LlmService(address, channel, LlmServiceStub(channel))

    @property
    def usable(self) -> list[LlmService]:
        """Those that can serve."""
        return [service for service in self.services if service.info is not None]

    @property
    def models(self) -> dict[str, llm_pb2.LlmServiceGetInfoResponse]:
        """The models that are served, by name."""
        return {service.info.model: service.info for service in self.services if service.info is not None}

    def name(self, model: str | None) -> str:
        """What an answer calls the model: as it was asked for, or whichever is served."""
        return model or next(iter(self.models), "")

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks at all of them, again and again, for the length of the block; the channels are closed at its end."""
        for service in self.services:
            service.watcher = tasks.start(self._watch(service), f"watch {service.address}")
        try:
            yield
        finally:
            watchers = [service.watcher for service in self.services if service.watcher is not None]
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await asyncio.gather(*(service.channel.close() for service in self.services))

    async def _watch(self, service: LlmService) -> None:
        while True:
            await service.look(self._security.metadata)
            await asyncio.sleep(_WATCH_SECONDS)

    async def tokenize(
        self, model: str, request: llm_pb2.TokenizeRequest, metadata: Metadata
    ) -> tuple[llm_pb2.TokenizeResponse, llm_pb2.LlmServiceGetInfoResponse]:
        """Token ids by a service of this model ("": any), and what that service is. Raises TwinlensError."""
        service = self._pick(model, ())
        about = (*self._security.metadata, *metadata)
        try:
            reply = await service.stub.Tokenize(request, timeout=_ANSWER_SECONDS, metadata=about)
        except grpc.aio.AioRpcError as error:
            raise _error(error, 0) from None
        return reply, service.info or llm_pb2.LlmServiceGetInfoResponse()

    async def generate(
        self,
        request: llm_pb2.GenerateRequest,
        metadata: Metadata,
        seconds: float,
        on_start: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[llm_pb2.GenerateResponse]:
        """The events of a generation. A service that cannot be reached, or is down, before its first event is passed
        over for another; `on_start` is called with that one. Closing the iterator ends the call, and the service then
        stops its work. Raises TwinlensError."""
        tried: list[LlmService] = []
        about = (*self._security.metadata, *metadata, (STATED, str(request.ByteSize())))
        while True:
            service = self._pick(request.model, tried)
            tried.append(service)
            events = 0
            service.in_flight += 1
            call = service.stub.Generate(request, timeout=seconds, metadata=about)
            try:
                while (event := await call.read()) is not grpc.aio.EOF:
                    if not events:
                        on_start()
                    events += 1
                    yield cast(llm_pb2.GenerateResponse, event)
                return
            except grpc.aio.AioRpcError as error:
                failure = _error(error, events)
                others = len(tried) < _ATTEMPTS and set(self.usable) - set(tried)
                if events or not isinstance(failure, Unavailable) or not others:
                    raise failure from None
                _log.info("a request goes elsewhere", address=service.address, why=failure.reason)
            finally:
                service.in_flight -= 1
                call.cancel()

    def _pick(self, model: str, tried: Sequence[LlmService]) -> LlmService:
        usable = [service for service in self.usable if service not in tried]
        if not usable:
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        fitting = [service for service in usable if not model or (service.info and service.info.model == model)]
        if not fitting:
            raise NotFound("no model of that name is served", reason="UNKNOWN_MODEL", field="model")
        return min(fitting, key=lambda service: service.in_flight)


def _error(error: grpc.aio.AioRpcError, events: int) -> TwinlensError:
    """What a failed call means to the caller, by the names that he has for things."""
    if is_too_large(error):
        return TooLarge("the request is larger than the LLM service takes", reason="BODY_TOO_LARGE")
    if is_of_the_link(error):
        if events:
            return Unavailable("the stream of the LLM service broke off", reason="STREAM_INTERRUPTED")
        return Unavailable("the LLM service cannot be reached", reason="NO_LLM_SERVICE")
    stated = from_rpc_error(error)
    if isinstance(stated, Unauthenticated):  # our token, not the caller's
        return Unavailable("the LLM service cannot be used", reason="NO_LLM_SERVICE")
    if stated.reason == DeadlineExceeded.default_reason:
        return DeadlineExceeded("the request took too long")
    return stated.at(param_of(stated.field))
