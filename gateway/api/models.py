"""`GET /v1/models`: the models served."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from common.errors import Unavailable
from gateway.errors import NoRoute
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import json_answer
from twinlens.v1 import llm_pb2, media_pb2

_MODALITIES: Final = {
    media_pb2.MODALITY_IMAGE: "image",
    media_pb2.MODALITY_VIDEO: "video",
    media_pb2.MODALITY_AUDIO: "audio",
}


_POOLINGS: Final = {
    llm_pb2.POOLING_LAST: "last",
    llm_pb2.POOLING_MEAN: "mean",
    llm_pb2.POOLING_CLS: "cls",
}


class Models:
    """Lists models."""

    def __init__(self, services: LlmServices) -> None:
        self._services = services

    async def list(self, request: Request) -> Response:
        """All served models, and the LoRA adapters over them. Raises Unavailable while none can serve."""
        context_of(request, "models")
        if not self._services.usable:  # an empty list would mean that there are none
            raise Unavailable("no LLM service is available", reason="NO_LLM_SERVICE")
        models = [self._model(name, info) for name, info in self._services.models.items()]
        adapters = [self._adapter(name, info) for name, info in self._services.adapters.items()]
        listed = [_told(each, request) for each in (*models, *adapters)]
        pages = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return json_answer({"object": "list", "data": listed, **(pages if _is_anthropics(request) else {})})

    async def one(self, request: Request) -> Response:
        """One model. Raises NoRoute if none is named, else as `LlmServices.pick`."""
        context_of(request, "models")
        name = request.path_params["name"]
        if not name:
            raise NoRoute(404, "there is nothing at this path; /v1/models lists the models")
        if (base := self._services.adapters.get(name)) is not None:
            return json_answer(_told(self._adapter(name, base), request))
        info = self._services.models.get(name)
        if info is None:
            raise self._services.lack(name)
        return json_answer(_told(self._model(name, info), request))

    def _model(self, name: str, info: llm_pb2.LlmServiceGetInfoResponse) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._services.since(info.model),
            "owned_by": "twinlens",
            "max_model_len": info.context_tokens,
            "modalities": [_MODALITIES[each] for each in info.modalities if each in _MODALITIES],
            "embeddings": _embeddings(info.embeddings) if info.HasField("embeddings") else None,
            "reranker": info.HasField("reranker"),
        }

    def _adapter(self, name: str, info: llm_pb2.LlmServiceGetInfoResponse) -> dict[str, Any]:
        """As vLLM tells of one: a model of its own, with the one that it was trained over as its parent."""
        return {**self._model(name, info), "parent": info.model}


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _told(model: dict[str, Any], request: Request) -> dict[str, Any]:
    """A model, for callers of Anthropic's API with its fields as well."""
    if not _is_anthropics(request):
        return model
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    context = {"max_input_tokens": model["max_model_len"], "max_tokens": model["max_model_len"]}
    return {
        **model,
        "type": "model",
        "display_name": model["id"],
        "created_at": created,
        "lifecycle": "active",
        **context,
    }


def _embeddings(told: llm_pb2.Embeddings) -> dict[str, Any]:
    """The description of a model's embeddings."""
    pooling = _POOLINGS.get(told.pooling)
    return {"dimensions": told.dimensions, "pooling": pooling, "normalized": told.normalized}
