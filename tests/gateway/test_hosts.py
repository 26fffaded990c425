"""A gateway on loopback that needs no token is not asked by the name of a web page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.hosts import Hosts
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import said

CHAT = "/v1/chat/completions"
BODY = {"messages": [said("x")]}


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted(allow_hosts="chat.internal", allow_origins="https://app.example.org") as running:
        yield running


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_another_name_is_refused_wherever_it_asks(door: Scripted, host: str) -> None:
    asked = [door.post(CHAT, BODY, {"host": host}), door.get("/v1/models", {"host": host})]
    asked += [door.get(path, {"host": host}) for path in ("/", "/metrics", "/version", "/health")]
    assert {(reply.status, reply.error["code"]) for reply in asked} == {(403, "HOST_NOT_ALLOWED")}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "me.localhost",
        "127.0.0.1:9",
        "[::1]",
        "10.1.2.3",
        "Chat.Internal.:80",
        "app.example.org",
    ],
)
def test_its_own_names_and_addresses_may_ask(door: Scripted, host: str) -> None:
    assert door.post(CHAT, BODY, {"host": host}).status == 200


def config(listen: str, **more: object) -> GatewayConfig:
    return GatewayConfig(listen=listen, llm=("127.0.0.1:1",), **more)  # type: ignore[arg-type]


def test_who_listens_elsewhere_or_needs_a_token_or_lets_all_in_may_have_any_name(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("one\n")
    for open_to_all in (
        config("0.0.0.0:8000"),
        config("[::]:8000"),
        config("gateway.internal:8000"),
        config("127.0.0.1:8000", auth_token_file=str(tokens)),
        config("127.0.0.1:8000", allow_hosts=("*",)),
        config("127.0.0.1:8000", allow_origins=("*",)),
    ):
        assert Hosts(open_to_all).allow("evil.example")
    for alone in ("127.0.0.1:8000", "127.0.0.9:0", "[::1]:8000", "localhost:8000"):
        hosts = Hosts(config(alone))
        assert not hosts.allow("evil.example")
        assert hosts.allow("")
