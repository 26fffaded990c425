"""The page's files as they are served, and what it is told: where time went, and load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import Door
from tests.launch import ROOT, gateway
from tests.waiting import until
from twinlens import v1

FILES = sorted(path.name for path in (ROOT / "gateway/page").iterdir())
QUESTION = {"messages": [{"role": "user", "content": "What?"}], "stream": True}


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_every_file_is_served_under_a_strict_policy(door: Scripted, path: str) -> None:
    reply = door.get(path)
    assert reply.status == 200
    assert reply.body == (ROOT / "gateway/page" / (path.removeprefix("/page/").strip("/") or "index.html")).read_bytes()
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not any(word in rules for rules in policy.values() for word in ("unsafe", "http", "*", "data:"))
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", FILES)
def test_addresses_are_relative(name: str) -> None:
    """So that the page can be served below another path, by whatever stands before the gateway."""
    assert not re.search(r"""["'(]/\w""", (ROOT / "gateway/page" / name).read_text())


def test_a_file_that_has_not_changed_is_not_sent_again(door: Scripted) -> None:
    first = door.get("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = door.get("/page/app.js", {"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert door.get("/page/app.js", {"if-none-match": '"another"'}).status == 200


def test_a_question_about_a_file_has_no_body(door: Scripted) -> None:
    reply = door.post("/", b"", method="HEAD")
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) == len(door.get("/").body)


@pytest.mark.parametrize(
    "name",
    [
        *("..", "../api/page.py", "%2e%2e/api/page.py", "..%2fconfig.py", "%2e%2e%2fconfig.py", "..%5cconfig.py"),
        *("/etc/passwd", "%2fetc%2fpasswd", "index.html%00.js", ".", "", "index.html/", "Index.html", "page.py"),
    ],
)
def test_no_path_leads_elsewhere(door: Scripted, name: str) -> None:
    reply = door.get(f"/page/{name}")
    assert (reply.status, reply.error["code"]) == (404, "NOT_FOUND")


def test_the_page_needs_no_token_and_what_it_asks_does(tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    with scripted(auth_token_file=tokens) as door:
        assert door.get("/").status == door.get("/page/app.js").status == 200
        assert door.get("/v1/twinlens/load").status == door.get("/v1/models").status == 401
        assert door.get("/v1/twinlens/load", {"authorization": "Bearer secret"}).status == 200


def test_a_gateway_may_have_no_page() -> None:
    with scripted(page="false") as door:
        assert {door.get(path).status for path in ("/", "/page/app.js")} == {404}
        assert door.get("/v1/models").status == 200


def last_of(door: Scripted, **options: bool) -> dict[str, Any]:
    """The last chunk of a stream."""
    reply = door.post("/v1/chat/completions", {**QUESTION, "stream_options": options})
    assert reply.status == 200
    *_, last, done, rest = reply.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return dict(json.loads(last.removeprefix("data: ")))


def timed(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
    """Two choices about two pictures, the second of which was known."""
    spans = [v1.MediaSpan(item=1, rows=9, cached=True), v1.MediaSpan(item=0, rows=4)]
    yield v1.GenerateResponse(started=v1.GenerateStarted(spans=spans))
    for index in range(2):
        stages = [
            v1.StageTiming(stage="encoder_vit", seconds=0.5, start_seconds=-0.25, end_seconds=0.25),
            v1.StageTiming(stage="decode_tokens", seconds=1 + index),
        ]
        yield v1.GenerateResponse(finished=v1.GenerateFinished(index=index, timings=stages))


def test_times_are_told_to_whoever_asks_for_them(door: Scripted) -> None:
    door.llm.play, play = timed, door.llm.play
    try:
        reply = door.post("/v1/chat/completions", {**QUESTION, "n": 2, "stream_options": {"include_timings": True}})
    finally:
        door.llm.play = play
    last = json.loads(reply.body.decode().split("\n\n")[-3].removeprefix("data: "))
    assert last["choices"] == []
    assert "usage" not in last
    assert last["timings"] == {
        "stages": [
            {"stage": "encoder_vit", "seconds": 0.5, "start_seconds": -0.25, "end_seconds": 0.25},
            {"stage": "decode_tokens", "seconds": 2.0, "start_seconds": None, "end_seconds": None},
        ],
        "media": [{"rows": 4, "cached": False}, {"rows": 9, "cached": True}],
    }


def test_times_are_told_to_nobody_else(door: Scripted) -> None:
    assert set(last_of(door, include_usage=True)) == {"id", "created", "model", "object", "choices", "usage"}
    assert {"usage", "timings"} <= set(last_of(door, include_usage=True, include_timings=True))
    for options in ({}, {"include_timings": False}):
        assert last_of(door, **options)["choices"][0]["finish_reason"] == "stop"


def test_times_are_for_chats_alone(door: Scripted) -> None:
    body = {"prompt": "What?", "stream": True, "stream_options": {"include_timings": True}}
    error = door.post("/v1/completions", body).error
    assert (error["code"], error["param"]) == ("FIELD_NOT_SERVED", "stream_options.include_timings")


def test_load_is_what_services_said_last(door: Scripted) -> None:
    door.llm.encoders = ["127.0.0.1:7001"]

    def service() -> dict[str, Any]:
        (only,) = json.loads(door.get("/v1/twinlens/load").body)["services"]
        return dict(only)

    until(lambda: service()["load"]["encoders"], "the LLM service has been asked since")
    told = service()
    assert (told["usable"], told["model"], told["version"], told["devices"]) == (True, "demo", "0.9", ["cpu"])
    assert told["in_flight"] == 0
    assert (told["load"]["prefix_hit_tokens"], told["load"]["prefix_query_tokens"]) == (50, 200)
    (encoder,) = told["load"]["encoders"]
    assert (encoder["address"], encoder["usable"], encoder["failures"]) == ("127.0.0.1:7001", True, 2)


def test_a_service_that_cannot_be_used_has_no_load() -> None:
    with gateway("127.0.0.1:1", fork=False) as running:
        until(lambda: json.loads(Door(running).get("/v1/twinlens/load").body)["services"], "its address is known")
        (service,) = json.loads(Door(running).get("/v1/twinlens/load").body)["services"]
    assert (service["address"], service["usable"], service["load"]) == ("127.0.0.1:1", False, None)
