"""`GET /v1/twinlens/load`: how all services are doing, as LLM services say it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.measured import fields_of
from gateway.request_context import context_of
from gateway.services import LlmService, LlmServices
from gateway.stream import json_answer


class Load:
    """Answers with the last known state, so that frequent requests cost the services nothing."""

    def __init__(self, services: LlmServices) -> None:
        self._services = services

    async def answer(self, request: Request) -> Response:
        """All LLM services that are known, usable or not."""
        context_of(request, "load")
        return json_answer({"services": [_service(each) for each in self._services.services]})


def _service(service: LlmService) -> dict[str, Any]:
    info = service.info
    return {
        "address": service.address,
        "usable": info is not None,
        "model": service.model or None,
        "version": None if info is None else info.version,
        "devices": [] if info is None else list(info.devices),
        "in_flight": service.in_flight,
        "load": None if info is None else fields_of(service.last_load),
    }
