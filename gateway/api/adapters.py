"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them: at every LLM service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar

import grpc
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common import log
from common.errors import InvalidInput, NotFound, TwinlensError, Unavailable
from gateway.api.fields import Model
from gateway.errors import NotEverywhere
from gateway.request_context import RequestContext, context_of
from gateway.services import LlmService, LlmServices, error_of
from gateway.stream import json_answer
from twinlens.v1 import llm_pb2

_log = log.get("adapters")
_SECONDS = 300.0
"""The longest that a service may take to read an adapter from its disk."""
_OURS = {"name": "lora_name", "path": "lora_path"}

Text = Annotated[str, Field(max_length=4096)]
Change = Callable[[LlmService], Awaitable[object]]


class UnloadRequest(Model):
    """Which adapter goes. `base_model_name`, for gateways of several models: at the services of this one alone."""

    lora_name: Text
    base_model_name: Text | None = None


class LoadRequest(UnloadRequest):
    """Which adapter comes, and its folder below each service's `--lora-dir`."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"load_inplace": (False,), "pinned": (False,)}

    lora_path: Text


class Adapters:
    """Loads and unloads LoRA adapters at every LLM service, one change after the other."""

    def __init__(self, services: LlmServices) -> None:
        self._services = services
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[dict[str, TwinlensError | None]]] = set()

    @property
    def routes(self) -> list[Route]:
        """Where both are answered."""
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Has every service load an adapter. Raises NotEverywhere where only some did."""
        context = context_of(request, "adapters")
        asked = await context.read(LoadRequest)
        wanted = llm_pb2.LoadAdapterRequest(name=asked.lora_name, path=asked.lora_path)
        metadata = self._metadata(context)
        outcomes = await self._everywhere(
            asked,
            lambda service: service.stub.LoadAdapter(wanted, timeout=_SECONDS, metadata=metadata),
        )
        return self._answer("load", asked, outcomes)

    async def unload(self, request: Request) -> Response:
        """Has every service that has it unload an adapter. Raises NotFound where none has it, and as `load`."""
        context = context_of(request, "adapters")
        asked = await context.read(UnloadRequest)
        wanted = llm_pb2.UnloadAdapterRequest(name=asked.lora_name)
        metadata = self._metadata(context)
        outcomes = await self._everywhere(
            asked,
            lambda service: service.stub.UnloadAdapter(wanted, timeout=_SECONDS, metadata=metadata),
        )
        if any(error is None for error in outcomes.values()):  # those that never had it are as they should be
            outcomes = {at: None if isinstance(error, NotFound) else error for at, error in outcomes.items()}
        return self._answer("unload", asked, outcomes)

    def _metadata(self, context: RequestContext) -> tuple[tuple[str, str], ...]:
        return (*self._services.metadata, *context.metadata)

    async def _everywhere(self, asked: UnloadRequest, change: Change) -> dict[str, TwinlensError | None]:
        """What came of a change, by the service's address. A caller who leaves does not end it half way."""
        task = asyncio.create_task(self._change(asked.base_model_name or "", change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _change(self, base: str, change: Change) -> dict[str, TwinlensError | None]:
        async with self._changing:
            chosen = self._chosen(base)
            errors = await asyncio.gather(*(self._at(service, change) for service in chosen))
            return {service.address: error for service, error in zip(chosen, errors, strict=True)}

    def _chosen(self, base: str) -> list[LlmService]:
        """The services of a model, and those of which no model is known yet. Raises TwinlensError where it is not clear
        which they are."""
        services = self._services.services
        models = {service.model for service in services if service.model}
        if base and base not in models:
            raise self._services.lack(base).at("base_model_name")
        if not base and len(models) > 1:
            raise InvalidInput("several models are served: say over which", reason="BAD_FIELD", field="base_model_name")
        if not services:
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        return [service for service in services if not base or service.model in ("", base)]

    async def _at(self, service: LlmService, change: Change) -> TwinlensError | None:
        """Changes one service, and knows at once what it has then."""
        try:
            await change(service)
        except grpc.aio.AioRpcError as error:
            refused = error_of(error)
            return refused.at(_OURS.get(refused.field, refused.field))
        except grpc.aio.UsageError:  # it is on no list any more, and its channel has been closed
            return Unavailable("the LLM service cannot be reached", reason="NO_LLM_SERVICE")
        await service.look(self._services.metadata)
        return None

    def _answer(self, verb: str, asked: UnloadRequest, outcomes: dict[str, TwinlensError | None]) -> Response:
        """Says what was done. Raises what all services refused it for, or NotEverywhere."""
        name = asked.lora_name[:128]
        for address, error in outcomes.items():
            _log.info("an adapter change", change=verb, adapter=name, address=address, outcome=_reason(error))
        refused = [error for error in outcomes.values() if error is not None]
        if len(refused) == len(outcomes) and len({error.reason for error in refused}) == 1:
            raise refused[0]
        if refused:
            raise NotEverywhere(outcomes)
        return json_answer({"object": f"lora_adapter.{verb}ed", "lora_name": name, "services": list(outcomes)})


def _reason(error: TwinlensError | None) -> str:
    return "OK" if error is None else error.reason
