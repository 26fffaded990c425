"""What is not about generating: models, tokens, health, metrics, the release."""

from __future__ import annotations

from typing import Annotated, Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFound, Unavailable
from common.metrics import Metrics
from gateway import convert
from gateway.api.chat import Message
from gateway.api.fields import MediaSettings, Model, Tokens
from gateway.frame import Call, Frame
from gateway.services import LlmServices
from gateway.stream import json_answer
from twinlens import __version__
from twinlens.v1 import llm_pb2


class TokenizeRequest(Model):
    """vLLM's question about tokens: of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _is_about_one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeRequest(Model):
    """vLLM's question about their text."""

    model: str | None = None
    tokens: Tokens


class House:
    """Answers about the gateway and its LLM services."""

    frame: Frame

    def __init__(self, services: LlmServices, metrics: Metrics) -> None:
        self._services = services
        self._metrics = metrics

    async def models(self, request: Request) -> Response:
        """All models that are served."""
        request.scope["twinlens.call"].surface = "models"
        return json_answer({"object": "list", "data": [_model(info) for info in self._services.models.values()]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        request.scope["twinlens.call"].surface = "models"
        info = self._services.models.get(request.path_params["name"])
        if info is None:
            raise NotFound("no model of that name is served", reason="UNKNOWN_MODEL", field="model")
        return json_answer(_model(info))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a chat without media."""
        call: Call = request.scope["twinlens.call"]
        call.surface = "tokenize"
        asked = await call.read(TokenizeRequest)
        if asked.messages is None:
            message = llm_pb2.TokenizeRequest(text=asked.prompt, allow_special=True)
        else:
            chat = llm_pb2.ChatInput(
                messages=[
                    convert.message(each, MediaSettings(), f"messages[{number}]")
                    for number, each in enumerate(asked.messages)
                ]
            )
            message = llm_pb2.TokenizeRequest(chat=chat)
        reply, info = await self._services.tokenize(asked.model or "", message, call.metadata)
        ids = list(reply.ids)
        return json_answer({"count": len(ids), "max_model_len": info.context_tokens, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        call: Call = request.scope["twinlens.call"]
        call.surface = "tokenize"
        asked = await call.read(DetokenizeRequest)
        message = llm_pb2.DetokenizeRequest(ids=asked.tokens)
        reply = await self._services.detokenize(asked.model or "", message, call.metadata)
        return json_answer({"prompt": reply.text})

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        """The process answers."""
        return json_answer({"status": "ok"})

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """At least one LLM service can serve, and the gateway does not stop."""
        if self.frame.closed:
            raise Unavailable("the gateway stops", reason="STOPPING")
        if not self._services.usable:
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        return json_answer({"status": "ok"})

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """What Prometheus scrapes."""
        return Response(await self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """The release."""
        return json_answer({"version": __version__})


def _model(info: llm_pb2.LlmServiceGetInfoResponse) -> dict[str, Any]:
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "twinlens",
        "max_model_len": info.context_tokens,
    }
