"""Embeds a prompt: chooses LLM services, and another one if a service fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc

from common.errors import DeadlineExceeded, TwinlensError
from common.rpc.channel import is_cut_off
from common.rpc.request_budget import STATED
from common.telemetry import log
from gateway.prompt_turns import Patience
from gateway.request_context import RequestContext
from gateway.routing_key import key_of
from gateway.services import LlmService, LlmServices, Metadata, Outgoing, connection_lost, error_of
from twinlens.v1 import llm_pb2


class EmbeddingCalls:
    """Asks LLM services for embeddings, each within `seconds`. Nothing is sent to the caller before an embedding is
    complete, so if a service goes away another one is asked. `on_usage` gets the usage and the caller."""

    def __init__(self, services: LlmServices, seconds: float, on_usage: Callable[[str, llm_pb2.Usage], None]) -> None:
        self._services = services
        self._seconds = seconds
        self._on_usage = on_usage

    async def embed(self, request: llm_pb2.EmbedRequest, context: RequestContext) -> llm_pb2.EmbedResponse:
        """A prompt's embedding, by the service that has seen its beginning, or by another if that one is down or ends.
        Raises TwinlensError."""
        request.cache_salt = context.caller.salt(request.cache_salt)
        key, until = await key_of(request), time.perf_counter() + self._seconds
        service = self._services.pick(request.model, key)
        offered, patience = list[LlmService](), Patience(context)
        while True:
            offered.append(service)
            try:
                answer = await self._ask(service, request, context.metadata, until - time.perf_counter())
            except TwinlensError as failure:
                try:
                    service = self._services.elsewhere(failure, request.model, key, offered)
                except TwinlensError as refusal:
                    await patience.wait(refusal)
                    offered.clear()
                    service = self._services.pick(request.model, key)
            else:
                context.gets_on()
                self._on_usage(context.caller.name, answer.usage)
                return answer

    async def _ask(
        self, service: LlmService, request: llm_pb2.EmbedRequest, metadata: Metadata, seconds: float
    ) -> llm_pb2.EmbedResponse:
        if seconds <= 0:
            raise DeadlineExceeded("the request took too long")
        outgoing = Outgoing(request)
        told = self._services.metadata_for((*metadata, (STATED, str(outgoing.size))))
        log.bind(llm=service.address)
        call = service.channels.embed(outgoing, timeout=seconds, metadata=told)
        service.in_flight += 1
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        except asyncio.CancelledError:
            if not is_cut_off(call):
                raise
            raise connection_lost(begun=False) from None
        finally:
            service.in_flight -= 1
