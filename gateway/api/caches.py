"""`POST /reset_prefix_cache`, `/reset_mm_cache`, `/reset_encoder_cache` as in vLLM, and SGLang's `/flush_cache`: every
LLM service drops KV blocks and rows that no request uses. Encoders keep their results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import Unavailable
from gateway.everywhere import asked, done_everywhere
from gateway.request_context import context_of
from gateway.services import LlmService, LlmServices, Metadata
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
        """The paths that it answers."""
        return [Route(path, self.flush, methods=["POST"]) for path in _PATHS]

    async def flush(self, request: Request) -> Response:
        """Reports what each service has dropped. Raises Unavailable if none can serve, the error of all, or
        NotEverywhere."""
        context = context_of(request, "caches")
        if not (services := self._services.usable):
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        metadata = self._services.metadata_for(context.metadata)
        outcomes = await asyncio.gather(*(asked(service, _flush(metadata)) for service in services))
        forgotten = [
            {"address": service.address, "kv_blocks": reply.kv_blocks, "row_bytes": reply.row_bytes}
            for service, reply in done_everywhere(dict(zip(services, outcomes, strict=True))).items()
        ]
        return json_answer({"object": "caches.flushed", "services": forgotten})


def _flush(metadata: Metadata) -> Callable[[LlmService], Awaitable[llm_pb2.LlmServiceFlushCacheResponse]]:
    request = llm_pb2.LlmServiceFlushCacheRequest()
    return lambda service: service.channels.stub.FlushCache(request, timeout=_SECONDS, metadata=tuple(metadata))
