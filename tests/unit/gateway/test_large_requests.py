"""A body of many parts is made a request of in a thread: its parts are for the gateway's event loop as many turns."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from gateway.api.chat import Chat
from gateway.api.completions import Completions
from gateway.api.embeddings import Embeddings
from gateway.api.messages import Messages
from gateway.api.responses import Responses
from gateway.api.scores import Scores
from gateway.api.tokenize import Tokenizer
from gateway.chat_answers import ChatAnswers
from gateway.convert import conversation, prompt_inputs
from gateway.dialect import dialect_of
from gateway.errors import TooLarge
from gateway.prompt_counts import PromptCounts
from gateway.prompt_turns import PromptBatches, PromptTurns
from gateway.request_context import SCOPE_KEY, BodyBudget, BodyLease, RequestContext
from twinlens.v1 import llm_pb2

RERANKER = llm_pb2.Reranker(true_token_id=3, false_token_id=5)
CHAT = {"messages": [{"role": "user", "content": "x"}]}


async def tokenized(*_: Any) -> tuple[llm_pb2.TokenizeResponse, llm_pb2.LlmServiceGetInfoResponse]:
    return llm_pb2.TokenizeResponse(), llm_pb2.LlmServiceGetInfoResponse()


def services(*, reranks: bool = False) -> Any:
    info = llm_pb2.LlmServiceGetInfoResponse(reranker=RERANKER) if reranks else None
    return SimpleNamespace(
        name=lambda model: model or "demo", about=lambda _: info, tokenize=tokenized, fills_a_context=bool
    )


SERVICES: Any = services()


class Answering:
    """What surfaces ask: it says nothing but a token that it is made to, and embeds all as one number."""

    async def events(
        self, request: llm_pb2.GenerateRequest, *_: Any, **__: Any
    ) -> AsyncGenerator[llm_pb2.GenerateResponse]:
        yield llm_pb2.GenerateResponse(started=llm_pb2.GenerateStarted())
        forced = request.sampling.logit_bias
        delta = llm_pb2.GenerateDelta(token_ids=forced, logprobs=[llm_pb2.TokenLogprobs(logprob=-1)] * len(forced))
        yield llm_pb2.GenerateResponse(delta=delta)
        yield llm_pb2.GenerateResponse(finished=llm_pb2.GenerateFinished())

    async def embed(self, *_: Any) -> llm_pb2.EmbedResponse:
        return llm_pb2.EmbedResponse(values=[1.0])


MODEL: Any = Answering()
CHATS = ChatAnswers(SERVICES, MODEL)
COUNTS = PromptCounts(SERVICES, MODEL)
BATCHES = PromptBatches(PromptTurns(4, lambda: 4), 4, 1 << 30)
QUERY = {"query": "x", "documents": [{"content": "y"}]}
SURFACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (Chat(SERVICES, CHATS).answer, CHAT),
    "completions": (Completions(SERVICES, MODEL, BATCHES).answer, {"prompt": "x"}),
    "embeddings": (Embeddings(SERVICES, MODEL, BATCHES).answer, CHAT),
    "scores": (Scores(SERVICES, MODEL, MODEL, BATCHES).rerank, QUERY),
    "reranker": (Scores(services(reranks=True), MODEL, MODEL, BATCHES).rerank, QUERY),
    "messages": (Messages(SERVICES, CHATS, COUNTS).answer, {**CHAT, "max_tokens": 4}),
    "tokens of messages": (Messages(SERVICES, CHATS, COUNTS).count, CHAT),
    "responses": (Responses(SERVICES, CHATS, COUNTS).answer, {"input": "x"}),
    "tokens of responses": (Responses(SERVICES, CHATS, COUNTS).count, {"input": "x"}),
    "tokenize": (Tokenizer(SERVICES).tokenize, CHAT),
}


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_a_large_body_is_made_a_request_of_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, name: str, large: bool
) -> None:
    makers = set[threading.Thread]()
    module, maker = (prompt_inputs, "prompts") if name == "completions" else (conversation, "fill_chat")
    make = getattr(module, maker)

    def watched(*given: Any, **more: Any) -> Any:
        makers.add(threading.current_thread())
        return make(*given, **more)

    monkeypatch.setattr(module, maker, watched)
    answer, body = SURFACES[name]
    context = RequestContext("a", (), BodyLease(BodyBudget(1 << 30)), dialect_of("/v1/x"))
    context.body = json.dumps(body).encode() + b" " * (large * (256 << 10))
    told = await answer(Request({"type": "http", "headers": [], SCOPE_KEY: context}))
    assert told.status_code == 200
    assert makers
    assert (threading.main_thread() in makers) != large


def test_a_prompt_alone_is_not_measured_and_several_are_together() -> None:
    measured = []

    class Sized:
        def ByteSize(self) -> int:
            measured.append(self)
            return 2

    one, two, three = (cast(llm_pb2.EmbedRequest, Sized()) for _ in range(3))
    assert list(prompt_inputs.within(1, [one])) == [one]
    assert measured == []
    taken = prompt_inputs.within(5, [one, two, three])
    assert [next(taken), next(taken)] == [one, two]
    with pytest.raises(TooLarge):
        next(taken)
    assert measured == [one, two, three]
