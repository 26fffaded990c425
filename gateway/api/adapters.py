"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them: at every LLM service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import InvalidInput, NotFound, TwinlensError, Unavailable
from common.telemetry import log
from gateway.api.fields import Model
from gateway.everywhere import done_everywhere
from gateway.kept_adapters import Change, Kept, KeptAdapters, load, unload
from gateway.request_context import context_of
from gateway.services import LlmService, LlmServices, Metadata
from gateway.stream import json_answer

_log = log.get("adapters")
_OURS = {"name": "lora_name", "path": "lora_path"}
_EXISTS = "ADAPTER_EXISTS"

Text = Annotated[str, Field(max_length=4096)]
Outcomes = dict[LlmService, TwinlensError | None]
"""The outcome of a change at each service, None if it succeeded."""


class UnloadRequest(Model):
    """The adapter to unload; with `base_model_name`, for gateways with several models, at that model's services
    only."""

    lora_name: Text
    base_model_name: Text | None = None


class LoadRequest(UnloadRequest):
    """The adapter to load, and its folder below each service's `--lora-dir`."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"load_inplace": (False,), "pinned": (False,)}

    lora_path: Text


class Adapters:
    """Loads and unloads LoRA adapters at every LLM service, one change after the other, and has services that come
    later brought to the same."""

    def __init__(self, services: LlmServices, kept: KeptAdapters) -> None:
        self._services = services
        self._kept = kept
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Outcomes]] = set()

    @property
    def routes(self) -> list[Route]:
        """The paths of both."""
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Has every service load an adapter. Raises NotEverywhere if only some did."""
        context = context_of(request, "adapters")
        asked = await context.read(LoadRequest)
        outcomes = await self._to_its_end(self._load(asked, self._services.metadata_for(context.metadata)))
        return self._answer("load", asked, outcomes)

    async def unload(self, request: Request) -> Response:
        """Has every service that has it unload an adapter. Raises NotFound if none has it, or was to load it, and as
        `load`."""
        context = context_of(request, "adapters")
        asked = await context.read(UnloadRequest)
        outcomes = await self._to_its_end(self._unload(asked, self._services.metadata_for(context.metadata)))
        return self._answer("unload", asked, outcomes)

    async def _to_its_end(self, change: Coroutine[Any, Any, Outcomes]) -> Outcomes:
        """The outcomes of a change, which goes on if the caller leaves."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _load(self, asked: LoadRequest, metadata: Metadata) -> Outcomes:
        async with self._changing:
            base = self._services.own_name(asked.base_model_name or "")
            chosen = self._chosen(base)
            outcomes = await self._at(chosen, load(asked.lora_name, asked.lora_path, metadata), asked.lora_name)
            over = next((service.model for service, error in outcomes.items() if error is None and service.model), "")
            if not over and (before := self._kept.find(base, asked.lora_name)) is not None:
                over = before.base if before.path == asked.lora_path else ""  # after a failure it is tried again
            if over:
                self._kept.keep(Kept(over, asked.lora_name, asked.lora_path), outcomes)
            return outcomes

    async def _unload(self, asked: UnloadRequest, metadata: Metadata) -> Outcomes:
        async with self._changing:
            base = self._services.own_name(asked.base_model_name or "")
            chosen = self._chosen(base)
            known = self._kept.forget(base, asked.lora_name)
            outcomes = await self._at(chosen, unload(asked.lora_name, metadata))
            known = known or any(error is None for error in outcomes.values())
            if known:  # services without it need no change
                outcomes = {at: None if isinstance(error, NotFound) else error for at, error in outcomes.items()}
                self._kept.owe(asked.lora_name, outcomes)
            return outcomes

    async def _at(self, chosen: Sequence[LlmService], change: Change, loads: str = "") -> Outcomes:
        errors = await asyncio.gather(*(self._kept.change(service, change, loads=loads) for service in chosen))
        mine = (error and error.at(_OURS.get(error.field, error.field)) for error in errors)
        return dict(zip(chosen, mine, strict=True))

    def _chosen(self, base: str) -> list[LlmService]:
        """The services of a model, and those whose model is not known yet. Raises TwinlensError if it is not clear
        which model is meant."""
        services = self._services.services
        models = {service.model for service in services if service.model}
        if base and base not in models:
            raise self._services.lack(base).at("base_model_name")
        if not base and len(models) > 1:
            raise InvalidInput(
                "several models are served: name the base model", reason="BAD_FIELD", field="base_model_name"
            )
        if not services:
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        return [service for service in services if not base or service.model in ("", base)]

    def _answer(self, verb: str, asked: UnloadRequest, found: Outcomes) -> Response:
        """The response. Raises the error of all services, or NotEverywhere."""
        name, addresses = asked.lora_name[:128], [service.address for service in found]
        for address, error in zip(addresses, found.values(), strict=True):
            _log.info("an adapter change", change=verb, adapter=name, address=address, outcome=_reason(error))
        try:
            done_everywhere(found)
        except TwinlensError as error:
            if error.reason == _EXISTS:  # 400 as in vLLM, whose words clients check
                raise InvalidInput("the adapter has already been loaded", reason=_EXISTS, field=_OURS["name"]) from None
            raise
        return json_answer({"object": f"lora_adapter.{verb}ed", "lora_name": name, "services": addresses})


def _reason(error: TwinlensError | None) -> str:
    return "OK" if error is None else error.reason
