"""Endpoints for operators: health, metrics, version."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from common.errors import Unavailable
from common.telemetry.metrics import Metrics
from gateway.middleware import RequestMiddleware
from gateway.services import LlmServices
from gateway.stream import json_answer
from twinlens import __version__


class Operations:
    """Answers about the gateway itself."""

    middleware: RequestMiddleware

    def __init__(self, services: LlmServices, metrics: Metrics) -> None:
        self._services = services
        self._metrics = metrics

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        """The process answers."""
        return json_answer({"status": "ok"})

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """At least one LLM service can serve, and the gateway does not stop."""
        if self.middleware.draining:
            raise Unavailable("the gateway stops", reason="STOPPING")
        if not self._services.usable:
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        return json_answer({"status": "ok"})

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Prometheus metrics."""
        return Response(await self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """The release."""
        return json_answer({"version": __version__})
