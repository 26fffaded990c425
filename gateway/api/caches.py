"""`POST /reset_prefix_cache`, `/reset_mm_cache`, `/reset_encoder_cache` as vLLM has them, and SGLang's `/flush_cache`:
every LLM service forgets KV blocks and rows that no request uses. Encoders keep what they have computed."""

from __future__ import annotations

import asyncio

import grpc
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import TwinlensError, Unavailable
from gateway.errors import NotEverywhere
from gateway.request_context import context_of
from gateway.services import LlmService, LlmServices, Metadata, error_of
from gateway.stream import json_answer
from twinlens.v1 import llm_pb2

_PATHS = ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/flush_cache")
_SECONDS = 30.0
"""An engine empties its caches between two steps."""


class Caches:
    """Empties the caches of all LLM services that can serve."""

    def __init__(self, services: LlmServices) -> None:
        self._services = services

    @property
    def routes(self) -> list[Route]:
        """What it answers."""
        return [Route(path, self.flush, methods=["POST"]) for path in _PATHS]

    async def flush(self, request: Request) -> Response:
        """Says what each has forgotten. Raises Unavailable where none can serve, the error of all, or NotEverywhere."""
        context = context_of(request, "caches")
        if not (services := self._services.usable):
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        metadata = (*self._services.metadata, *context.metadata)
        outcomes = await asyncio.gather(*(_flush(service, metadata) for service in services))
        failed = [outcome for outcome in outcomes if isinstance(outcome, TwinlensError)]
        if len(failed) == len(outcomes) and len({error.reason for error in failed}) == 1:
            raise failed[0]
        if failed:
            met = (outcome if isinstance(outcome, TwinlensError) else None for outcome in outcomes)
            raise NotEverywhere({each.address: error for each, error in zip(services, met, strict=True)})
        forgotten = [
            {"address": service.address, "kv_blocks": outcome.kv_blocks, "row_bytes": outcome.row_bytes}
            for service, outcome in zip(services, outcomes, strict=True)
            if not isinstance(outcome, TwinlensError)
        ]
        return json_answer({"object": "caches.flushed", "services": forgotten})


async def _flush(service: LlmService, metadata: Metadata) -> llm_pb2.LlmServiceFlushCacheResponse | TwinlensError:
    try:
        reply: llm_pb2.LlmServiceFlushCacheResponse = await service.stub.FlushCache(
            llm_pb2.LlmServiceFlushCacheRequest(), timeout=_SECONDS, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    except grpc.aio.UsageError:  # it is on no list any more, and its channel has been closed
        return Unavailable("the LLM service cannot be reached", reason="NO_LLM_SERVICE")
    return reply
