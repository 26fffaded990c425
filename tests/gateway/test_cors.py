"""Pages of other origins: let in by name alone, with their preflights and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import Reply, said

CHAT = "/v1/chat/completions"
APP = "https://app.example.org"
TOKEN = {"authorization": "Bearer one"}
BODY = {"messages": [said("x")]}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    tokens = Path(tmp_path_factory.mktemp("tokens")) / "tokens"
    tokens.write_text("one\n", "utf-8")
    with scripted(allow_origins=f"{APP},http://localhost:5173", auth_token_file=tokens) as running:
        yield running


def preflight(door: Scripted, origin: str, method: str = "POST") -> Reply:
    """What a browser asks before it sends what a page of this origin wants to send."""
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization,x-stainless-os"}
    return door.post(CHAT, b"", {"origin": origin, **asked}, "OPTIONS")


@pytest.mark.parametrize("origin", [APP, "http://localhost:5173"])
def test_a_page_of_a_named_origin_may_ask_and_needs_no_token_to_learn_so(door: Scripted, origin: str) -> None:
    reply = preflight(door, origin)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "access-control-allow-credentials" not in reply.headers
    assert "Origin" in reply.headers["vary"]


@pytest.mark.parametrize("origin", ["https://app.example.org.evil.net", "http://app.example.org", "null"])
def test_a_page_of_another_origin_may_not(door: Scripted, origin: str) -> None:
    reply = preflight(door, origin)
    assert (reply.status, "access-control-allow-origin" in reply.headers) == (400, False)
    answer = door.post(CHAT, BODY, {"origin": origin, **TOKEN})
    assert (answer.status, "access-control-allow-origin" in answer.headers) == (200, False)


def test_a_method_that_nothing_has_is_not_allowed(door: Scripted) -> None:
    assert preflight(door, APP, "DELETE").status == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_page_can_read_answers_and_the_requests_id(door: Scripted, stream: bool) -> None:
    reply = door.post(CHAT, {**BODY, "stream": stream}, {"origin": APP, **TOKEN})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, APP)
    assert {"x-request-id", "retry-after"} <= {*reply.headers["access-control-expose-headers"].split(", ")}


def test_a_page_can_read_what_is_wrong(door: Scripted) -> None:
    stranger = door.post(CHAT, BODY, {"origin": APP})
    assert (stranger.status, stranger.error["code"]) == (401, "UNAUTHENTICATED")
    assert stranger.headers["access-control-allow-origin"] == APP
    refused = door.post(CHAT, {**BODY, "n": "two"}, {"origin": APP, **TOKEN})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, APP)


def test_who_is_no_page_notices_nothing(door: Scripted) -> None:
    reply = door.post(CHAT, BODY, TOKEN)
    assert (reply.status, "access-control-allow-origin" in reply.headers) == (200, False)


def test_no_origin_is_let_in_unless_it_is_asked_for_and_every_one_may_be() -> None:
    with scripted() as closed:
        assert preflight(closed, APP).status == 405
        assert "access-control-allow-origin" not in closed.post(CHAT, BODY, {"origin": APP}).headers
    with scripted(allow_origins="*") as wide:
        assert preflight(wide, "null").headers["access-control-allow-origin"] == "*"
        assert wide.post(CHAT, BODY, {"origin": APP}).headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "origin", ["app.example.org", "https://app.example.org/", "https://App.example.org", "https://*"]
)
def test_an_origin_that_no_browser_would_write_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="--allow-origins"):
        GatewayConfig(allow_origins=(origin,)).validate()


def test_origins_of_all_sorts_are_taken() -> None:
    GatewayConfig(allow_origins=("*", "http://[::1]:8080", "chrome-extension://abc", "http://10.0.0.1")).validate()
