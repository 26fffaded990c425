"""The vectors of a request are written one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from gateway.api.embeddings import Embeddings
from gateway.dialect import dialect_of
from gateway.prompt_turns import PromptBatches, PromptTurns
from gateway.request_context import SCOPE_KEY, BodyBudget, BodyLease, RequestContext
from twinlens.v1 import llm_pb2


class Vector:
    """One that says when it is read."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._on_read = on_read

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[float]:
        self._on_read()
        return iter((0.5, -0.25))


@pytest.mark.parametrize(("form", "written"), [("float", [0.5, -0.25]), ("base64", "AAAAPwAAgL4=")])
async def test_others_get_their_turns_between_two_vectors(form: str, written: Any) -> None:
    turn, read = 0, list[int]()

    async def others() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def embed(request: llm_pb2.EmbedRequest, *_: Any) -> Any:
        for _turn in range(int(request.text.prompt)):  # they come one by one
            await asyncio.sleep(0)
        return SimpleNamespace(values=Vector(lambda: read.append(turn)), usage=llm_pb2.Usage(prompt_tokens=1))

    services: Any = SimpleNamespace(name=lambda _: "demo")
    model: Any = SimpleNamespace(embed=embed)
    context = RequestContext("a", (), BodyLease(BodyBudget(1 << 30)), dialect_of("/v1/embeddings"))
    context.body = json.dumps({"input": ["2", "1", "3"], "encoding_format": form}).encode()
    other = asyncio.create_task(others())
    answer = await Embeddings(services, model, PromptBatches(PromptTurns(3, lambda: 3), 4, 1 << 30)).answer(
        Request({"type": "http", "headers": [], SCOPE_KEY: context})
    )
    other.cancel()
    assert len(set(read)) == len(read) == 3
    told = json.loads(bytes(answer.body))
    assert told["data"] == [{"object": "embedding", "index": n, "embedding": written} for n in range(3)]
    assert told["usage"]["prompt_tokens"] == 3
