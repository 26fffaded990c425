"""The LLM services that requests are handed to: which there are, which can serve, and one call to one of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
from google.protobuf.message import Message

from common import log, tasks
from common.errors import DeadlineExceeded, NotFound, TwinlensError, Unauthenticated, Unavailable
from common.grpc_channel import ChannelSecurity, from_rpc_error, is_of_the_link, is_too_large, open_channel
from common.rendezvous import ranked
from common.request_budget import STATED
from common.resolver import Resolver
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
_KEY_CHARACTERS, _KEY_TOKENS = 2048, 512
"""How much of a prompt's beginning decides where it goes."""
_LARGE = 256 << 10
"""Bytes of a request that is hashed in a thread."""
_LAST_SECONDS = 600.0
"""For requests under way at a service that is on no list any more."""
_MOST_ABOVE_MEAN = 1.25
"""What a service may have under way, as a share of the mean of all, before requests go to the next one."""

Reply = TypeVar("Reply")
Metadata = Sequence[tuple[str, str]]


@dataclass(eq=False, slots=True)
class LlmService:
    """One LLM service. `info` is what it last said of itself, None while it cannot serve; `model` is what it
    served then as well; `waiting` are requests of anyone that wait there."""

    address: str
    channel: grpc.aio.Channel
    stub: LlmServiceAsyncStub
    info: llm_pb2.LlmServiceGetInfoResponse | None = None
    model: str = ""
    in_flight: int = 0
    waiting: int = 0
    watcher: asyncio.Task[None] | None = field(default=None)

    @property
    def load(self) -> int:
        """Requests that a further one would compete with."""
        return self.in_flight + self.waiting

    async def look(self, metadata: Metadata) -> None:
        """Asks it what it is. It serves once its engine has said how long a context it has memory for."""
        try:
            info = await self.stub.GetInfo(
                llm_pb2.LlmServiceGetInfoRequest(), timeout=_ANSWER_SECONDS, metadata=tuple(metadata)
            )
            load = await self.stub.GetLoad(
                llm_pb2.LlmServiceGetLoadRequest(), timeout=_ANSWER_SECONDS, metadata=tuple(metadata)
            )
            self.waiting = load.waiting
        except grpc.aio.AioRpcError as error:
            now, cause = None, error.code().name
        else:
            now, cause = (info, "") if info.context_tokens else (None, "STARTING")
        if (now is None) != (self.info is None):
            said = "an LLM service can be used" if now else "an LLM service cannot be used"
            _log.info(said, address=self.address, cause=cause)
        self.info = now
        self.model = now.model if now else self.model


class LlmServices:
    """All LLM services of one gateway."""

    def __init__(self, addresses: Sequence[str], security: ChannelSecurity) -> None:
        self._security = security
        self._resolver = Resolver(addresses)
        self._known: dict[str, LlmService] = {}

    def _open(self, address: str, name: str) -> LlmService:
        channel = open_channel(address, self._security, name=name)
        service = LlmService(address, channel, LlmServiceStub(channel))
        service.watcher = tasks.start(self._watch(service), f"watch {address}")
        return service

    @property
    def services(self) -> list[LlmService]:
        """Those that are known now."""
        return list(self._known.values())

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
        resolving = tasks.start(self._keep_resolving(), "resolve LLM services")
        try:
            yield
        finally:
            resolving.cancel()
            await asyncio.gather(resolving, return_exceptions=True)
            for address in list(self._known):
                await self._close(self._known.pop(address), None)

    async def _keep_resolving(self) -> None:
        """Looks names and lists up again and again. A service that is on none of them any more gets no new request."""
        leaving: set[asyncio.Task[None]] = set()
        while True:
            wanted = await self._resolver.resolve()
            for address in wanted.keys() - self._known.keys():
                try:
                    self._known[address] = self._open(address, wanted[address])
                except OSError as error:  # certificates cannot be read just now
                    _log.error("an LLM service cannot be spoken to", address=address, cause=str(error))
            for address in self._known.keys() - wanted.keys():
                closing = tasks.start(self._close(self._known.pop(address), _LAST_SECONDS), f"close {address}")
                leaving.add(closing)
                closing.add_done_callback(leaving.discard)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _close(self, service: LlmService, grace: float | None) -> None:
        """Forgets a service; what is under way there has `grace` seconds to end."""
        if service.watcher is not None:
            service.watcher.cancel()
            await asyncio.gather(service.watcher, return_exceptions=True)
        await service.channel.close(grace)

    async def _watch(self, service: LlmService) -> None:
        while True:
            await service.look(self._security.metadata)
            await asyncio.sleep(_WATCH_SECONDS)

    async def tokenize(
        self, model: str, request: llm_pb2.TokenizeRequest, metadata: Metadata
    ) -> tuple[llm_pb2.TokenizeResponse, llm_pb2.LlmServiceGetInfoResponse]:
        """Token ids by a service of this model ("": any), and what that service is. Raises TwinlensError."""
        service = self._pick(model, b"")
        reply = await self._short(service.stub.Tokenize, request, metadata)
        return reply, service.info or llm_pb2.LlmServiceGetInfoResponse()

    async def detokenize(
        self, model: str, request: llm_pb2.DetokenizeRequest, metadata: Metadata
    ) -> llm_pb2.DetokenizeResponse:
        """The text of token ids, likewise."""
        return await self._short(self._pick(model, b"").stub.Detokenize, request, metadata)

    async def _short(self, method: Callable[..., Awaitable[Reply]], request: Message, metadata: Metadata) -> Reply:
        try:
            return await method(request, timeout=_ANSWER_SECONDS, metadata=(*self._security.metadata, *metadata))
        except grpc.aio.AioRpcError as error:
            raise _error(error, 0) from None

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
        key = await _key(request)
        about = (*self._security.metadata, *metadata, (STATED, str(request.ByteSize())))
        while True:
            service = self._pick(request.model, key, tried)
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
                others = len(tried) < _ATTEMPTS and self._fitting(request.model, tried)
                if events or not isinstance(failure, Unavailable) or not others:
                    raise failure from None
                _log.info("a request goes elsewhere", address=service.address, why=failure.reason)
            finally:
                service.in_flight -= 1
                call.cancel()

    def _pick(self, model: str, key: bytes, tried: Sequence[LlmService] = ()) -> LlmService:
        """The service that a request goes to, by what makes it meet its beginning. Raises NotFound for a model that no
        service is known to have, Unavailable where there is none that can serve."""
        fitting = self._fitting(model, tried)
        if not fitting:
            known = [service.model for service in self.services]
            if model and known and all(known) and model not in known:
                raise NotFound("no model of that name is served", reason="UNKNOWN_MODEL", field="model")
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        most = _MOST_ABOVE_MEAN * (sum(service.load for service in fitting) + 1) / len(fitting)
        in_order = ranked(key, fitting, lambda service: service.address)
        return next((service for service in in_order if service.load < most), in_order[0])

    def _fitting(self, model: str, tried: Sequence[LlmService]) -> list[LlmService]:
        """Those that can serve the model ("": any), and were not tried."""
        return [service for service in self.usable if service not in tried and model in ("", service.model)]


async def _key(request: llm_pb2.GenerateRequest) -> bytes:
    """The routing key; in a thread, where there are megabytes to hash."""
    return await asyncio.to_thread(routing_key, request) if request.ByteSize() > _LARGE else routing_key(request)


def routing_key(request: llm_pb2.GenerateRequest) -> bytes:
    """What makes requests meet the service that computed their beginning: the conversation's name; or else the tenant,
    the prompt up to the first question's end, and the first of its media as it is given."""
    if request.session_id:
        return hashlib.sha256(f"session\0{request.cache_salt}\0{request.session_id}".encode()).digest()
    digest = hashlib.sha256(f"prompt\0{request.cache_salt}\0".encode())
    match request.WhichOneof("input"):
        case "chat":
            room = _KEY_CHARACTERS
            for message in request.chat.messages:
                for part in message.parts:
                    digest.update(part.text[:room].encode())
                    room -= len(part.text[:room])
                if message.role == "user":
                    break
            media = (
                part.media for message in request.chat.messages for part in message.parts if part.HasField("media")
            )
            if (first := next(media, None)) is not None:
                digest.update(first.SerializeToString(deterministic=True))
        case "text":
            digest.update(request.text.prompt[:_KEY_CHARACTERS].encode())
        case "tokens":
            digest.update(repr(request.tokens.ids[:_KEY_TOKENS]).encode())
        case _:
            pass
    return digest.digest()


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
