"""A body of many parts is made a request of in a thread: its parts are for the gateway's event loop as many turns."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from gateway import convert
from gateway.api.chat import Chat
from gateway.api.completions import Completions
from gateway.api.embeddings import Embeddings
from gateway.api.messages import Messages
from gateway.api.responses import Responses
from gateway.dialect import dialect_of
from gateway.request_context import SCOPE_KEY, BodyBudget, BodyLease, RequestContext
from twinlens.v1 import llm_pb2

SERVICES: Any = SimpleNamespace(name=lambda model: model or "demo", about=lambda _: None)
CHAT = {"messages": [{"role": "user", "content": "x"}]}


class Answering:
    """What surfaces ask: it says nothing, and embeds all as one number."""

    async def events(self, *_: Any) -> AsyncGenerator[llm_pb2.GenerateResponse]:
        yield llm_pb2.GenerateResponse(started=llm_pb2.GenerateStarted())
        yield llm_pb2.GenerateResponse(finished=llm_pb2.GenerateFinished())

    async def embed(self, *_: Any) -> llm_pb2.EmbedResponse:
        return llm_pb2.EmbedResponse(values=[1.0])


MODEL: Any = Answering()
SURFACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (Chat(SERVICES, MODEL), CHAT),
    "completions": (Completions(SERVICES, MODEL, 4, 1 << 30), {"prompt": "x"}),
    "embeddings": (Embeddings(SERVICES, MODEL, 4, 1 << 30), CHAT),
    "messages": (Messages(SERVICES, MODEL), {**CHAT, "max_tokens": 4}),
    "responses": (Responses(SERVICES, MODEL), {"input": "x"}),
}


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_a_large_body_is_made_a_request_of_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, name: str, large: bool
) -> None:
    makers = set[threading.Thread]()
    maker = "prompts" if name == "completions" else "message"
    make = getattr(convert, maker)
    monkeypatch.setattr(convert, maker, lambda *given: makers.add(threading.current_thread()) or make(*given))
    surface, body = SURFACES[name]
    context = RequestContext("a", (), BodyLease(BodyBudget(1 << 30)), dialect_of("/v1/x"))
    context.body = json.dumps(body).encode() + b" " * (large * (256 << 10))
    answer = await surface.answer(Request({"type": "http", "headers": [], SCOPE_KEY: context}))
    assert answer.status_code == 200
    assert makers
    assert (threading.main_thread() in makers) != large
