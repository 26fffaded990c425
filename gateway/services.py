"""The LLM services of a gateway: which there are, which can serve, and which of them gets a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from common.aio import tasks
from common.errors import (
    ENCODER_SLOW,
    MEDIA_CHANGED,
    MEDIA_HOST,
    DeadlineExceeded,
    Exhausted,
    NotFound,
    TwinlensError,
    Unauthenticated,
    Unavailable,
)
from common.rpc.channel import (
    ChannelSecurity,
    from_rpc_error,
    is_stream_reset,
    is_too_large,
    is_transport_error,
)
from common.rpc.channel_set import ChannelSet
from common.rpc.rendezvous_hash import ranked
from common.rpc.replica_set import ReplicaSet, Upkeep
from common.rpc.resolver import Resolver
from common.telemetry import log
from gateway.errors import TooLarge, param_of
from twinlens.obstacles import obstacle_in
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_log = log.get("services")
_WATCH_SECONDS = 1.0
"""From one look at a service to the next, and at the lists of them."""
_FIRST_SECONDS = 5.0
"""How long a gateway waits for the first answers of services before it serves."""
_ANSWER_SECONDS = 5.0
"""The time limit of a service's description and of other short calls."""
_STARTING, _STOPPING = "STARTING", "STOPPING"
"""Why a service that answers cannot serve."""
_FULL = "TOO_MANY_CALLS"
"""The reason of a service that has as many calls as it takes, and says so itself."""
_RESETS = 30
"""Consecutive resets by gRPC after which a service counts as gone: one that is only crowded answers in between, a proxy
that resets every call never does."""
_LAST_SECONDS = 600.0
"""For calls in progress at a service that is no longer listed, or over replaced certificates; requests have their own
limits."""
_MOST_ABOVE_MEAN = 1.25
"""Requests in progress at a service, relative to the mean of all, beyond which the next service gets a request."""
_OFFERS = 3
"""Services that a request is offered to before its answer has begun."""
_OF_THE_MEDIA = MEDIA_HOST, MEDIA_CHANGED, ENCODER_SLOW
"""Reasons that concern a media address or an item: no service is to blame, and each would fail alike."""
_SLOW = "REQUEST_TOO_SLOW"
"""The reason of a request that did not arrive completely, wherever it was sent."""

Reply = TypeVar("Reply")
Metadata = Sequence[tuple[str, str]]


class Outgoing:
    """A request on its way out, of `size` bytes. gRPC keeps its argument until the call ends, so this holds next to
    nothing once it is sent."""

    def __init__(self, request: Message) -> None:
        serialized = request.SerializeToString()
        self.size = len(serialized)
        self._serialized: bytes | None = serialized

    def serialize(self) -> bytes:
        """The request, once."""
        serialized, self._serialized = self._serialized, None
        assert serialized is not None
        return serialized


class LlmChannels:
    """The calls of one LLM service: `generate` and `embed` send an `Outgoing`, `stub` has all other calls. Its
    description and load are asked on a channel of their own, `about`. Raises as `ChannelSet`."""

    def __init__(self, channels: ChannelSet) -> None:
        self.connections = channels
        (calls,) = channels.calls
        self.about: LlmServiceAsyncStub = LlmServiceStub(channels.own)
        self.stub: LlmServiceAsyncStub = LlmServiceStub(calls)
        self.generate: grpc.aio.UnaryStreamMultiCallable[Outgoing, llm_pb2.GenerateResponse] = calls.unary_stream(
            "/twinlens.v1.LlmService/Generate",
            request_serializer=Outgoing.serialize,
            response_deserializer=llm_pb2.GenerateResponse.FromString,
        )
        self.embed: grpc.aio.UnaryUnaryMultiCallable[Outgoing, llm_pb2.EmbedResponse] = calls.unary_unary(
            "/twinlens.v1.LlmService/Embed",
            request_serializer=Outgoing.serialize,
            response_deserializer=llm_pb2.EmbedResponse.FromString,
        )


@dataclass(frozen=True, slots=True)
class _Heard:
    """A service's description, None if it gave none, and why it cannot be used; the cause is empty if it can."""

    info: llm_pb2.LlmServiceGetInfoResponse | None
    cause: str


@dataclass(eq=False, slots=True)
class LlmService:
    """One LLM service. `info` is its last description, None while it cannot serve; `model` and its `adapters` are from
    when it last could; `last_load` is its last load. `came` counts how often it became able to serve, or its process
    changed. `between` is its description while it waits for its next engine: requests may wait there. A process that
    has just started accepts none."""

    address: str
    name: str
    channels: LlmChannels
    looked_at: bool = False
    came: int = 0
    info: llm_pb2.LlmServiceGetInfoResponse | None = None
    between: llm_pb2.LlmServiceGetInfoResponse | None = None
    model: str = ""
    aliases: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    in_flight: int = 0
    last_load: llm_pb2.LlmServiceGetLoadResponse = field(default_factory=llm_pb2.LlmServiceGetLoadResponse)
    watcher: asyncio.Task[None] | None = field(default=None)
    looking: asyncio.Task[None] | None = field(default=None)
    _looks: int = 0
    _last_look: int = 0
    _cause: str = ""
    _instance: int = 0
    _resets: int = 0

    def serves(self, model: str) -> bool:
        """Whether it has a model or an adapter of this name, or had when it could last serve."""
        return self.is_of(model) or model in self.adapters

    def is_of(self, model: str) -> bool:
        """The same of a model alone."""
        return model == self.model or model in self.aliases

    def reconnect(self, channels: LlmChannels) -> LlmChannels:
        """Has further calls use other channels. Returns the old ones, where calls may be in progress."""
        before, self.channels = self.channels, channels
        return before

    @property
    def load(self) -> int:
        """Requests that a further one would compete with: those from here, and all that wait there."""
        return self.in_flight + self.last_load.waiting

    async def look(self, metadata: Metadata) -> None:
        """Asks for its description. It serves once its engine has reported the context that fits into memory. A look
        never overrules one that began later."""
        self._looks += 1
        own = self._looks
        heard = await self._ask(metadata)
        if heard is None or own < self._last_look:
            return
        self._last_look = own
        between = heard.info if heard.cause == _STARTING and self.model else None
        self.between = between if between is not None and between.instance == self._instance else None
        if not self.looked_at or heard.cause != self._cause:
            said = "an LLM service cannot be used" if heard.cause else "an LLM service can be used"
            _log.info(said, address=self.address, cause=heard.cause)
        self.looked_at, self._cause = True, heard.cause
        if heard.info is None or heard.cause:
            self.info = None
            return
        info = heard.info
        self.came += self.info is None or info.instance != self.info.instance
        self.info, self.model, self._instance = info, info.model, info.instance
        self.aliases = frozenset(info.aliases)
        self.adapters = frozenset(adapter.name for adapter in info.adapters)

    async def _ask(self, metadata: Metadata) -> _Heard | None:
        """Its description; its load is kept. None if it is too busy, and otherwise unchanged."""
        channels = self.channels
        info: Any = None
        channels.connections.connect()
        try:
            info = await channels.about.GetInfo(
                llm_pb2.LlmServiceGetInfoRequest(), timeout=_ANSWER_SECONDS, metadata=tuple(metadata)
            )
            load: Any = self.last_load
            if info is not None and info.context_tokens:  # else no engine is there that could tell
                load = await channels.about.GetLoad(
                    llm_pb2.LlmServiceGetLoadRequest(), timeout=_ANSWER_SECONDS, metadata=tuple(metadata)
                )
            async with asyncio.timeout(_ANSWER_SECONDS):
                await channels.connections.connected()  # it may be back, and this one still wait to be tried
        except grpc.aio.AioRpcError as error:
            self._resets = self._resets + 1 if is_stream_reset(error) else 0
            too_much = from_rpc_error(error).reason == _FULL or 0 < self._resets < _RESETS
            return None if too_much and self.info is not None else _Heard(info, _cause(error))
        except grpc.aio.UsageError:  # the channels have been closed
            return _Heard(info, "GONE")
        except TimeoutError:
            return _Heard(info, "it answers, but the connection for calls cannot be made")
        if info is None or load is None:  # gRPC turns invalid bytes into None
            return _Heard(None, "its answer is not one of our messages")
        self.last_load, self._resets = load, 0
        return _Heard(info, "" if info.context_tokens else _STARTING)


def _cause(error: grpc.aio.AioRpcError) -> str:
    """Why a service does not answer, in words if possible."""
    reason = from_rpc_error(error).reason
    if reason == "ENGINE_UNAVAILABLE":  # it has described itself
        return _STARTING
    if reason == _STOPPING:
        return _STOPPING
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "what listens there is not an LLM service"
    obstacle = obstacle_in(error.details() or "")
    return obstacle.value if obstacle else error.code().name


async def _close(service: LlmService, grace: float | None) -> None:
    """Forgets a service; calls in progress there have `grace` seconds to end."""
    if service.watcher is not None:
        service.watcher.cancel()
        await asyncio.gather(service.watcher, return_exceptions=True)
    await service.channels.connections.close(grace)


class LlmServices:
    """All LLM services of one gateway. Requests take at most `request_seconds`; each service is checked every
    `watch_seconds`."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ChannelSecurity,
        *,
        request_seconds: float,
        watch_seconds: float = _WATCH_SECONDS,
    ) -> None:
        self._security = security
        self._watch_seconds = watch_seconds
        self._set = ReplicaSet(
            "LLM service",
            Resolver(addresses),
            security.files(),
            Upkeep(self._open, self._renew, _close),
            grace=max(_LAST_SECONDS, request_seconds),
        )
        self._listed = asyncio.Event()
        self._since: dict[str, int] = {}
        self.is_coming: Callable[[str], bool] = lambda _: False
        """Whether a service that can serve is about to have an adapter of this name."""

    def _open(self, address: str, name: str) -> LlmService:
        service = LlmService(address, name, LlmChannels(ChannelSet(address, name, self._security)))
        service.watcher = tasks.start(self._watch(service), f"watch {address}")
        return service

    @property
    def metadata(self) -> Metadata:
        """The metadata of every call."""
        return self._security.metadata

    def metadata_for(self, caller: Metadata) -> Metadata:
        """The metadata of a call made for a caller."""
        return (*self.metadata, *caller)

    @property
    def services(self) -> list[LlmService]:
        """All known services."""
        return list(self._set.known.values())

    @property
    def usable(self) -> list[LlmService]:
        """The services that can serve."""
        return [service for service in self.services if service.info is not None]

    @property
    def models(self) -> dict[str, llm_pb2.LlmServiceGetInfoResponse]:
        """The models that are served, by each of their names."""
        infos = [service.info for service in self.services if service.info is not None]
        return {name: info for info in infos for name in (info.model, *info.aliases)}

    @property
    def adapters(self) -> dict[str, llm_pb2.LlmServiceGetInfoResponse]:
        """The LoRA adapters of all services by name, with the description of a service that has it."""
        infos = [service.info for service in self.services if service.info is not None]
        return {adapter.name: info for info in infos for adapter in info.adapters}

    def since(self, model: str) -> int:
        """When a known service first had this model, in seconds since 1970; now, if none has yet."""
        return self._since.setdefault(model, int(time.time()))

    def name(self, model: str | None) -> str:
        """The model's name in an answer: as requested, or that of the model served."""
        waiting = (service.model for service in self.services if service.between is not None)
        return model or next(iter(self.models), "") or next(waiting, "")

    def own_name(self, model: str) -> str:
        """A model's own name, given any of its names; unchanged if nobody has it."""
        return next((service.model for service in self.services if service.is_of(model)), model)

    def about(self, model: str) -> llm_pb2.LlmServiceGetInfoResponse | None:
        """The description of a service with this model or adapter; None if there is none that a request may go to."""
        fitting = [service for service in self.services if service.serves(model)]
        infos = [*(service.info for service in fitting), *(service.between for service in fitting)]
        return next((info for info in infos if info is not None), None)

    def fills_a_context(self, tokens: int, model: str) -> bool:
        """Whether so many tokens, of prompt and answer, fill the context of a service with this model or adapter."""
        infos = [service.info for service in self.services if service.serves(model)]
        return any(info is not None and info.context_tokens == tokens for info in infos)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks at all of them, again and again, for the length of the block; the channels are closed at its end."""
        resolving = tasks.start(self._keep_looking(), "resolve LLM services")
        try:
            yield
        finally:
            resolving.cancel()
            await asyncio.gather(resolving, return_exceptions=True)
            await self._set.close()

    async def first_look(self) -> None:
        """Waits until a service can be used, or all listed ones have been asked or did not answer in time.

        A gateway that served earlier would refuse its first callers although there are services.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SECONDS):
                await self._listed.wait()
                asked = [asyncio.ensure_future(service.look(self.metadata)) for service in self.services]
                try:
                    for answered in asyncio.as_completed(asked):
                        await answered
                        if self.usable:
                            return
                finally:
                    for each in asked:
                        each.cancel()

    async def _keep_looking(self) -> None:
        """Looks names and lists up again and again. A service that is on none of them any more gets no new request."""
        while True:
            await self._set.look()
            self._listed.set()
            await asyncio.sleep(self._watch_seconds)

    def _renew(self, service: LlmService, grace: float) -> Coroutine[Any, Any, None]:
        """Calls from now on show, and trust, the certificates that are in the files now."""
        channels = LlmChannels(ChannelSet(service.address, service.name, self._security))
        return service.reconnect(channels).connections.close(grace)

    async def _watch(self, service: LlmService) -> None:
        while True:
            await service.look(self.metadata)
            if service.info is not None:
                self.since(service.info.model)
            await asyncio.sleep(self._watch_seconds)

    async def tokenize(
        self, model: str, request: llm_pb2.TokenizeRequest, metadata: Metadata
    ) -> tuple[llm_pb2.TokenizeResponse, llm_pb2.LlmServiceGetInfoResponse]:
        """Token ids by a service of this model ("": any), and that service's description. Raises TwinlensError."""
        service = self.pick(model, b"")
        reply = await self._short(service.channels.stub.Tokenize, request, metadata)
        return reply, service.info or llm_pb2.LlmServiceGetInfoResponse()

    async def detokenize(
        self, model: str, request: llm_pb2.DetokenizeRequest, metadata: Metadata
    ) -> llm_pb2.DetokenizeResponse:
        """The text of token ids, by a service of this model ("": any). Raises TwinlensError."""
        return await self._short(self.pick(model, b"").channels.stub.Detokenize, request, metadata)

    async def _short(self, method: Callable[..., Awaitable[Reply]], request: Message, metadata: Metadata) -> Reply:
        try:
            return await method(request, timeout=_ANSWER_SECONDS, metadata=self.metadata_for(metadata))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    def pick(self, model: str, key: bytes) -> LlmService:
        """The service for a request, by its routing key, so that prompts that begin alike use the same cache. If none
        can serve, the request waits at one that is between two engines. Raises NotFound for a model that no known
        service has, Unavailable if there is no service."""
        waiting = [service for service in self.services if service.between is not None]
        if fitting := self.fitting(model) or [service for service in waiting if not model or service.serves(model)]:
            return self.choose(key, fitting)
        raise self.lack(model)

    def lack(self, model: str) -> TwinlensError:
        """Why nobody serves this model now: no service has it, or those that have or may have it cannot serve."""
        known = self.services
        served = any(each.serves(model) for each in known) or self.is_coming(model)
        if model and known and all(each.model for each in known) and not served:
            return NotFound(
                "no model has that name; /v1/models lists the models",
                reason="UNKNOWN_MODEL",
                field="model",
            )
        return Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")

    def elsewhere(self, failure: TwinlensError, model: str, key: bytes, offered: Sequence[LlmService]) -> LlmService:
        """The next service for a request without any answer, after those that it was offered to. Raises the failure of
        the last of these if another would not help, or it was offered often enough."""
        others = self.fitting(model, offered) if len(offered) < _OFFERS else []
        if not others or not may_fare_better(failure):
            raise failure
        _log.info("a request is sent elsewhere", address=offered[-1].address, reason=failure.reason)
        return self.choose(key, others)

    def choose(self, key: bytes, fitting: Sequence[LlmService]) -> LlmService:
        """One of these services, by the routing key."""
        most = _MOST_ABOVE_MEAN * (sum(service.load for service in fitting) + 1) / len(fitting)
        in_order = ranked(key, fitting, lambda service: service.address)
        return next((service for service in in_order if service.load < most), in_order[0])

    def fitting(self, model: str, without: Sequence[LlmService] = ()) -> list[LlmService]:
        """The services that can serve the model or adapter ("": any), without some."""
        usable = [service for service in self.usable if service not in without]
        return [service for service in usable if not model or service.serves(model)]

    async def confirm(self, service: LlmService) -> bool:
        """Whether a service can serve, asked now. Concurrent callers share the answer."""
        if service.looking is None or service.looking.done():
            service.looking = tasks.start(service.look(self.metadata), f"look at {service.address}")
        await asyncio.shield(service.looking)
        return service in self.usable


def may_fare_better(failure: TwinlensError) -> bool:
    """Whether a request that failed at one service may succeed at another, which is up or has room."""
    match failure:
        case Unavailable():
            return failure.reason not in _OF_THE_MEDIA
        case Exhausted():  # for good: no retry helps
            return failure.retry_after is not None and failure.reason != _SLOW
        case _:
            return False


def connection_lost(*, begun: bool) -> Unavailable:
    """The error for a call that failed between the services."""
    if begun:
        return Unavailable("the stream of the LLM service broke off", reason="STREAM_INTERRUPTED")
    return Unavailable("the LLM service cannot be reached", reason="NO_LLM_SERVICE")


def error_of(error: grpc.aio.AioRpcError, *, begun: bool = False) -> TwinlensError:
    """The caller's error for a failed call; `begun`: its answer had begun."""
    if is_too_large(error):
        return TooLarge("the request is larger than the LLM service takes", reason="BODY_TOO_LARGE")
    if is_transport_error(error):
        if not begun and is_stream_reset(error):
            return Exhausted("the LLM service has too many calls", reason=_FULL)
        return connection_lost(begun=begun)
    stated = from_rpc_error(error)
    if isinstance(stated, Unauthenticated):  # our token, not the caller's
        return Unavailable("the LLM service cannot be used", reason="NO_LLM_SERVICE")
    if stated.reason == DeadlineExceeded.default_reason:
        return DeadlineExceeded("the request took too long")
    return stated.at(param_of(stated.field))
