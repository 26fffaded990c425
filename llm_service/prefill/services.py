"""Prompts computed elsewhere: another service of the same model computes a prompt, and its KV blocks are fetched, after
which the engine here continues. If that fails only time is lost: missing blocks are computed here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.aio import tasks
from common.errors import DataLoss, DeadlineExceeded, Exhausted, NotFound, Precondition, TwinlensError, Unavailable
from common.media.convert import MODALITIES
from common.rows.wire import crc32c
from common.rpc.channel import ChannelSecurity, from_rpc_error, open_channel
from common.rpc.rendezvous_hash import ranked
from common.rpc.replica_set import ReplicaSet, Upkeep
from common.rpc.resolver import Resolver
from common.telemetry import log, tracing
from llm_service.encoders.breaker import Breaker
from llm_service.engine_client.block_places import AwaitedBlocks, BlockPlaces
from llm_service.request import MediaSlot, Piece, Request, SoundLength
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

_log = log.get("prefill")
_RESOLVE_SECONDS = 2.0
_UNFIT_SECONDS = 30.0
"""How long one is left alone that serves another model, or lends nothing."""
_CROWDED = 4
"""If the first choice has so many prompts, the second is taken if it has fewer."""


@dataclass(slots=True)
class PrefillCounters:
    """Totals since start; see GetLoad in the contract."""

    prompts: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Service:
    """A service that computes prompts, and how many of ours it has."""

    address: str
    name: str
    channel: grpc.aio.Channel
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    unfit_until: float = 0.0

    @property
    def usable(self) -> bool:
        return self.breaker.closed and time.monotonic() >= self.unfit_until


class PrefillServices:
    """The services at `addresses`, in the form of `Resolver`. One of them computes a prompt that lacks `tokens` tokens
    or more, within `seconds`, if there is room for its blocks; `layout` identifies their form."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ChannelSecurity,
        blocks: BlockPlaces,
        layout: bytes,
        *,
        block_size: int,
        tokens: int,
        seconds: float,
    ) -> None:
        self.counters = PrefillCounters()
        self._security = security
        self._blocks = blocks
        self._layout = layout
        self._block_size = block_size
        self._tokens = tokens
        self._seconds = seconds
        self._services = ReplicaSet(
            "prefill service",
            Resolver(addresses),
            security.files(),
            Upkeep(self._open, self._renew, _close),
            grace=seconds,
        )
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look them up."""
        self._looking = tasks.start(self._keep_looking(), "prefill resolver")

    async def stop(self) -> None:
        """Closes all channels."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._services.close()

    async def bring(
        self, request: Request, pieces: Sequence[Piece], keys: Sequence[bytes], identities: Sequence[bytes]
    ) -> int:
        """Has a prompt computed elsewhere, if that is worth it. Returns how many of its first tokens are cached here
        afterwards, as far as known. `keys` are its items' keys. `identities` are those of its full blocks, without a
        last one that would leave nothing to compute."""
        try:
            return await self._bring(request, pieces, keys, identities)
        except Unavailable:  # our own engine has ended: the next one has none of them
            return 0

    async def _bring(
        self, request: Request, pieces: Sequence[Piece], keys: Sequence[bytes], identities: Sequence[bytes]
    ) -> int:
        size = self._block_size
        if not self._blocks.block_bytes or len(identities) * size < self._tokens:
            return 0
        found = await self._blocks.found(identities)
        missing = identities[found:]
        if len(missing) * size < self._tokens or self._choose(identities[0]) is None:
            return found * size
        async with self._blocks.awaited(missing) as awaited:
            enough = awaited.count * size >= self._tokens
            if enough and (service := self._choose(identities[0])) is not None:  # others have chosen meanwhile
                await self._receive(service, self._message(request, pieces, keys, found), awaited, missing, request)
        return (found + awaited.arrived) * size

    def _choose(self, prefix: bytes) -> _Service | None:
        """The service for prompts that begin with this prefix, unless it is crowded or failed lately."""
        services = [each for each in self._services.known.values() if each.usable]
        usable = ranked(prefix, services, lambda each: each.address)
        least = min((each.in_flight for each in usable), default=0)
        return next((each for each in usable if each.in_flight < _CROWDED or each.in_flight == least), None)

    async def _receive(
        self,
        service: _Service,
        message: llm_pb2.PrefillRequest,
        awaited: AwaitedBlocks,
        identities: Sequence[bytes],
        request: Request,
    ) -> None:
        """Receives the blocks that a service sends; those that arrive before a failure are kept."""
        self.counters.prompts += 1
        opened, service.in_flight = service.breaker.now(), service.in_flight + 1
        left = math.inf if request.deadline is None else request.deadline - time.monotonic()
        timeout = min(self._seconds, left)
        try:
            with tracing.span("prefill elsewhere", service=service.address):
                async with aclosing(self._parts(service, message, timeout)) as parts:
                    async for part in parts:
                        if awaited.arrived == awaited.count:
                            break
                        if part.identity != identities[awaited.arrived]:
                            raise _other_blocks(request)
                        awaited.write(part.offset, part.data)
            service.breaker.succeeded()
        except (TwinlensError, ValueError) as error:
            self._blocks.check(awaited.life)  # else it is our own engine that has ended
            hurried = isinstance(error, DeadlineExceeded) and left < self._seconds
            self._failed(service, None if hurried else opened, error, request.id)
        finally:
            service.in_flight -= 1

    async def _parts(
        self, service: _Service, message: llm_pb2.PrefillRequest, timeout: float
    ) -> AsyncGenerator[llm_pb2.PrefillResponse]:
        with _open(service.channel, message, timeout, (*self._security.metadata, *tracing.outgoing())) as call:
            try:
                async for part in call:
                    if crc32c(part.data) != part.crc32c or not part.data:
                        raise DataLoss("a KV block was damaged on the way")
                    yield part
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    def _failed(self, service: _Service, opened: float | None, error: Exception, request_id: str) -> None:
        """`opened` is when it was asked; None if the caller's deadline was too short, which does not count against
        it."""
        self.counters.failed += 1
        why = error.reason if isinstance(error, TwinlensError) else str(error)
        if isinstance(error, Precondition):
            service.unfit_until = time.monotonic() + _UNFIT_SECONDS
            _log.warning("a service computes no prompts for this one", address=service.address, reason=why)
            return
        if opened is not None and isinstance(error, Unavailable | DataLoss | DeadlineExceeded | ValueError):
            service.breaker.failed(opened)
        elif isinstance(error, Exhausted):
            service.unfit_until = time.monotonic() + min(_UNFIT_SECONDS, error.retry_after or 1.0)
        _log.info("a prompt is computed here", address=service.address, request_id=request_id, reason=why)

    def _message(
        self, request: Request, pieces: Sequence[Piece], keys: Sequence[bytes], first: int
    ) -> llm_pb2.PrefillRequest:
        return llm_pb2.PrefillRequest(
            request_id=request.id,
            model=request.adapter.name if request.adapter is not None else "",
            cache_salt=request.salt,
            priority=request.priority,
            pieces=map(_piece, pieces),
            media=[
                media_pb2.Media(modality=MODALITIES[item.modality], key=key)
                for item, key in zip(request.media, keys, strict=True)
            ],
            kv_layout=self._layout,
            first_block=first,
        )

    async def _keep_looking(self) -> None:
        while True:
            await self._services.look()
            await asyncio.sleep(_RESOLVE_SECONDS)

    def _open(self, address: str, name: str) -> _Service:
        return _Service(address, name, open_channel(address, self._security, name=name))

    def _renew(self, service: _Service, grace: float) -> Coroutine[Any, Any, None]:
        before, service.channel = service.channel, open_channel(service.address, self._security, name=service.name)
        return before.close(grace)


async def _close(service: _Service, grace: float | None) -> None:
    await service.channel.close(grace)


def _other_blocks(request: Request) -> TwinlensError:
    """The error of a service that sends other blocks than requested. If it has another adapter under the requested
    name, prompts without an adapter are not affected."""
    why = "a service sends other blocks than were requested"
    return DataLoss(why) if request.adapter is None else NotFound(why, reason="UNKNOWN_ADAPTER")


@contextmanager
def _open(
    channel: grpc.aio.Channel, message: llm_pb2.PrefillRequest, timeout: float, metadata: tuple[tuple[str, str], ...]
) -> Iterator[grpc.aio.UnaryStreamCall[llm_pb2.PrefillRequest, llm_pb2.PrefillResponse]]:
    """A call that is cancelled if the context is left early. Raises Unavailable if its channel is being closed."""
    try:
        call: Any = LlmServiceStub(channel).Prefill(message, timeout=timeout, metadata=metadata)
    except grpc.aio.UsageError as error:
        raise Unavailable("the service could not be reached") from error
    try:
        yield call
    finally:
        call.cancel()


def _piece(piece: Piece) -> llm_pb2.PromptPiece:
    match piece:
        case str():
            return llm_pb2.PromptPiece(text=piece)
        case int():
            return llm_pb2.PromptPiece(token=piece)
        case MediaSlot():
            return llm_pb2.PromptPiece(slot=llm_pb2.MediaSlot(token=piece.token))
        case SoundLength():
            return llm_pb2.PromptPiece(length_of=piece.item)
        case _:
            return llm_pb2.PromptPiece(ids=llm_pb2.TokenIds(ids=piece))
