"""Callers with names: what keeps them apart at the LLM services, and what is told of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import PICTURE, Trio, fronted, image, said, text
from tests.launch import Service
from tests.waiting import until
from twinlens import v1

NAMES = "alice\tkey-one\nalice\tkey-two\nbob\tkey-three\nkey-four\n"
CHAT = "/v1/chat/completions"
SEEN = {"messages": [said(image(), text("Look"))]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: SEEN,
    "/v1/completions": {"prompt": ["x", "y"]},
    "/v1/embeddings": {"input": ["x", "y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/score": {"text_1": "x", "text_2": "y"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}]
    },
    "/v1/messages": {"max_tokens": 9, "messages": [said("x")]},
    "/v1/messages/count_tokens": {
        "messages": [said({"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}})]
    },
}
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nx\r\n'
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--b--\r\n'
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(NAMES)
    with scripted(auth_token_file=tokens) as running:
        yield running


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("field", ["request_id", "rid"])
@pytest.mark.parametrize("path", [each for each in BODIES if "/messages" not in each and "/input_tokens" not in each])
def test_a_request_may_be_named_in_its_body(script: Scripted, path: str, field: str) -> None:
    script.llm.requests.clear()
    script.llm.to_embed.clear()
    reply = script.post(path, {**BODIES[path], field: "mine"}, {**bearer("key-one"), "x-request-id": "a-proxys"})
    assert reply.status == 200, reply.body
    assert reply.headers["x-request-id"] == "mine"
    assert {each.request_id.partition("-")[0] for each in [*script.llm.requests, *script.llm.to_embed]} == {"mine"}
    assert json.loads(reply.body)["id"].endswith(("-mine", "_mine"))


def salts(script: Scripted, path: str, token: str, **fields: Any) -> set[str]:
    """The salts of what the LLM service is asked for a request."""
    script.llm.requests.clear()
    script.llm.to_embed.clear()
    body: Any = {**BODIES[path], **fields} if path in BODIES else FORM
    kind = {} if path in BODIES else {"content-type": "multipart/form-data; boundary=b"}
    reply = script.post(path, body, {**bearer(token), **kind})
    assert reply.status == 200, reply.body
    asked = [*script.llm.requests, *script.llm.to_embed]
    assert asked
    return {each.cache_salt for each in asked}


@pytest.mark.parametrize("path", [*BODIES, "/v1/audio/transcriptions"])
def test_whatever_is_asked_has_the_salt_of_its_callers_name(script: Scripted, path: str) -> None:
    (alice,) = salts(script, path, "key-one")
    assert len(alice) == 64
    assert salts(script, path, "key-two") == {alice}
    assert salts(script, path, "key-three").isdisjoint({alice, ""})
    assert salts(script, path, "key-four") == {""}
    if path not in ("/v1/responses", "/v1/audio/transcriptions"):
        own = salts(script, path, "key-one", cache_salt="own")
        assert own.isdisjoint({alice, "own"})
        assert salts(script, path, "key-three", cache_salt="own").isdisjoint(own)
        assert salts(script, path, "key-three", cache_salt=alice).isdisjoint({alice}), "nobody states another's"
        assert salts(script, path, "key-four", cache_salt="own") == {"own"}


def test_a_callers_conversation_is_nobody_elses(script: Scripted) -> None:
    fields = {"prompt_cache_key": "one", "cache_salt": "own"}
    assert salts(script, CHAT, "key-one", **fields) != salts(script, CHAT, "key-three", **fields)
    assert script.llm.requests[0].session_id == "one"


def logged(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]


def test_metrics_and_logs_tell_of_each_name(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("key-four\n")
    with scripted(auth_token_file=tokens) as door:

        def metrics() -> bytes:
            return door.get("/metrics").body

        assert door.post(CHAT, SEEN, bearer("key-four")).status == 200
        assert b'{caller="' not in metrics()
        tokens.write_text(NAMES)
        for token, path in (("key-one", CHAT), ("key-two", "/v1/embeddings"), ("key-three", CHAT), ("key-four", CHAT)):
            assert door.post(path, BODIES[path], bearer(token)).status == 200
        assert door.post(CHAT, {}, bearer("key-three")).status == 400
        assert door.post(CHAT, SEEN, bearer("nobody")).status == 401
        counts = {
            'caller_requests_total{caller="alice",status="200",surface="chat"}': 1,
            'caller_requests_total{caller="alice",status="200",surface="embeddings"}': 1,
            'caller_requests_total{caller="bob",status="200",surface="chat"}': 1,
            'caller_requests_total{caller="bob",status="400",surface="chat"}': 1,
            'caller_tokens_total{caller="alice",kind="prompt"}': 9 + 2 * 9,
            'caller_tokens_total{caller="alice",kind="cached"}': 2 * 4,
            'caller_tokens_total{caller="alice",kind="completion"}': 3,
            'caller_tokens_total{caller="bob",kind="prompt"}': 9,
            'caller_tokens_total{caller="bob",kind="completion"}': 3,
        }
        for name, count in counts.items():
            until(lambda name=name, count=count: door.metric(name) == count, name)
        assert {part.partition(b'"')[0] for part in metrics().split(b'caller="')[1:]} == {b"alice", b"bob"}
        told = [each for each in logged(door.gateway) if each["event"] == "request"]
        assert [each.get("caller") for each in told] == [None, "alice", "alice", "bob", None, "bob"]
        assert not any(
            secret in door.gateway.log.read_text() for secret in ("key-one", "key-two", "key-three", "key-four")
        )


def test_who_leaves_has_used_what_was_answered(script: Scripted) -> None:
    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=50))
        for number in range(2 if request.sampling.max_tokens else 0):
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text="x", token_ids=[number]))
        raise RuntimeError

    tokens = 'caller_tokens_total{caller="bob",kind="%s"}'
    before = {kind: script.metric(tokens % kind) for kind in ("prompt", "completion")}
    usual, script.llm.play = script.llm.play, play
    try:
        for most in (0, 9):
            body = {**SEEN, "stream": True, "max_handovers": 0, **({"max_tokens": most} if most else {})}
            script.post(CHAT, body, bearer("key-three"))
    finally:
        script.llm.play = usual
    assert script.metric(tokens % "prompt") == before["prompt"] + 50, "one of the two was begun on"
    assert script.metric(tokens % "completion") == before["completion"] + 2


def test_a_medium_is_known_by_its_uuid_to_callers_of_one_name_alone(named: Trio) -> None:
    def asked(token: str, *parts: Any) -> Any:
        fields = {"max_tokens": 4, "return_media_uuids": True}
        return named.post(CHAT, {"messages": [said(text("Look"), *parts)], **fields}, bearer(token))

    shown = {token: json.loads(asked(token, image(PICTURE)).body)["media_uuids"] for token in ("key-one", "key-three")}
    assert shown["key-one"] != shown["key-three"]
    known = {"type": "image_url", "uuid": shown["key-one"][0]}
    for token in ("key-one", "key-two"):
        reply = asked(token, known)
        assert (reply.status, json.loads(reply.body)["media_uuids"]) == (200, shown["key-one"])
    for token in ("key-three", "key-four"):
        assert (asked(token, known).status, asked(token, known).error["code"]) == (404, "KEY_NOT_FOUND")


@pytest.fixture(scope="module")
def named(door: Trio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """A gateway that knows names, before services that compute."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(NAMES)
    with fronted(door.services, auth_token_file=tokens) as running:
        yield running
