"""Requests with many prompts at an LLM service that refuses what it has no room for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import grpc
import pytest

from tests.gateway.scripted import Scripted, scripted
from tests.unit.twinlens.fakes import FakeLlm, refuse
from twinlens import v1

FULL = v1.Status(code=8, message="too many requests are waiting", reason="TOO_MANY_WAITING", retry_after_ms=1000)
PROMPTS = [f"prompt {number}" for number in range(12)]


class Crowded(FakeLlm):
    """Refuses each call once, before it answers it."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = set[str]()
        self._lock = Lock()

    def _refuse_once(self, name: str, context: grpc.ServicerContext) -> None:
        with self._lock:
            new = name not in self.refused
            self.refused.add(name)
        if new:
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)

    def Embed(self, request, context):
        self._refuse_once(request.request_id, context)
        return super().Embed(request, context)

    def Generate(self, request, context):
        self._refuse_once(request.request_id, context)
        yield from super().Generate(request, context)


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted(Crowded(), max_prompt_calls=3) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "answers"),
    [
        ("/v1/embeddings", {"input": PROMPTS}, "data"),
        ("/v1/completions", {"prompt": PROMPTS}, "choices"),
        ("/score", {"text_1": "x", "text_2": PROMPTS}, "data"),
    ],
)
def test_a_prompt_that_is_refused_is_asked_again_and_the_others_keep_their_answers(
    door: Scripted, path: str, body: dict[str, Any], answers: str
) -> None:
    reply = door.post(path, body)
    assert reply.status == 200, reply.body
    assert len(json.loads(reply.body)[answers]) == len(PROMPTS)


def test_a_stream_of_several_prompts_begins_when_one_of_them_is_taken(door: Scripted) -> None:
    reply = door.post("/v1/completions", {"prompt": PROMPTS, "stream": True})
    assert reply.status == 200
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_a_request_with_one_prompt_is_told_at_once(door: Scripted) -> None:
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"prompt": ["x"]})):
        reply = door.post(path, body)
        assert (reply.status, reply.error["code"]) == (429, "TOO_MANY_WAITING")
        assert (reply.headers["retry-after"], reply.headers["x-should-retry"]) == ("1", "true")


def test_many_requests_with_many_prompts_are_all_answered(door: Scripted) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: door.post("/v1/embeddings", {"input": PROMPTS}), range(16)))
    assert [reply.status for reply in replies] == [200] * 16


def test_a_request_may_have_as_many_prompts_as_openais() -> None:
    with scripted() as door:
        reply = door.post("/v1/embeddings", {"input": ["x"] * 2048, "encoding_format": "base64"})
        assert reply.status == 200, reply.body
        assert len(json.loads(reply.body)["data"]) == 2048
        reply = door.post("/v1/embeddings", {"input": ["x"] * 2049})
        assert (reply.status, reply.error["code"]) == (400, "TOO_MANY_PROMPTS")


def test_who_is_refused_to_the_end_is_told_why() -> None:
    llm = FakeLlm()
    llm.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED, FULL
    with scripted(llm, request_seconds=1) as door:
        reply = door.post("/v1/embeddings", {"input": ["a", "b"]})
        assert (reply.status, reply.error["code"]) == (429, "TOO_MANY_WAITING")
