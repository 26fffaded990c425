"""Caches that whoever may do so empties, at every LLM service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gateway.trio import Door, Reply
from tests.launch import Service, gateway, llm_server
from tests.rpc.pairs import LLM_FLAGS
from tests.waiting import until

PATHS = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/flush_cache"]
PROMPT = {"prompt": "one two three four five six seven eight nine ten " * 4, "max_tokens": 1}


@pytest.fixture(scope="module")
def services(checkpoints: Callable[..., Path]) -> Iterator[list[Service]]:
    with ExitStack() as stack:
        flags = {**LLM_FLAGS, "block_size": 16}
        yield [stack.enter_context(llm_server(checkpoints("qwen3_vl"), **flags)) for _ in range(2)]


def ask(service: Service) -> int:
    """How much of a prompt it has had before."""
    with gateway(service.address) as running:
        front = Door(running)
        until(lambda: front.metric("llm_services_usable") == 1, "it can be used")
        reply = front.post("/v1/completions", PROMPT)
        assert reply.status == 200
        return int(json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def emptied(reply: Reply) -> dict[str, int]:
    assert reply.status == 200, reply.body
    return {each["address"]: each["kv_blocks"] for each in json.loads(reply.body)["services"]}


@pytest.mark.parametrize("path", PATHS)
def test_every_service_forgets_what_no_request_uses(services: list[Service], path: str) -> None:
    with gateway(*(each.address for each in services), allow_cache_resets="on") as running:
        front = Door(running)
        until(lambda: front.metric("llm_services_usable") == 2, "both can be used")
        front.post(path, b"")
        assert [ask(each) for each in services] == [0, 0]
        assert all(ask(each) for each in services), "the second time it is cached"
        assert set(emptied(front.post(path, b"")).values()) != {0}
        assert emptied(front.post(path, b"")) == {each.address: 0 for each in services}
        assert [ask(each) for each in services] == [0, 0]


def test_nobody_does_unless_that_is_allowed(services: list[Service]) -> None:
    with gateway(services[0].address) as running:
        replies = [Door(running).post(path, b"") for path in PATHS]
        assert [reply.status for reply in replies] == [404] * len(PATHS)
        assert all("only if the gateway has --allow-cache-resets" in reply.error["message"] for reply in replies)


def test_where_nobody_can_serve_there_is_nothing_to_empty() -> None:
    with gateway("127.0.0.1:1", allow_cache_resets="on") as running:
        reply = Door(running).post(PATHS[0], b"")
        assert (reply.status, reply.error["code"]) == (503, "NO_LLM_SERVICE")
