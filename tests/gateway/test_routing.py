"""Which of several LLM services is asked: that which knows the beginning, unless it is gone or has much to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.routing_key import key_of
from tests.gateway.replicas import replicas
from tests.gateway.trio import Door, said
from tests.launch import gateway
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from tests.waiting import until
from twinlens import audio, generate_request, image, system, transcription, user, v1

CHAT = "/v1/chat/completions"
DOWN = (grpc.StatusCode.UNAVAILABLE, v1.Status(code=14, message="no", reason="STOPPING", retry_after_ms=1000))


def full(seconds: int = 1, reason: str = "TOO_MANY_WAITING") -> tuple[grpc.StatusCode, v1.Status]:
    """What a service says that has too much to do, for so many seconds; 0: for good."""
    status = v1.Status(code=8, message="no", reason=reason, retry_after_ms=seconds * 1000 or None)
    return grpc.StatusCode.RESOURCE_EXHAUSTED, status


@contextmanager
def fakes(count: int, addresses: Path | None = None) -> Iterator[tuple[Door, list[FakeLlm]]]:
    """A gateway over so many scripted services."""
    services = [FakeLlm() for _ in range(count)]
    with replicas(services, addresses) as door:
        yield door, services


def ask(door: Door, question: str, **fields: Any) -> int:
    return door.post(CHAT, {"messages": [said(question)], **fields}).status


def asked(services: list[FakeLlm]) -> list[int]:
    return [len(each.requests) for each in services]


def test_what_begins_alike_goes_to_one_and_what_differs_is_spread() -> None:
    with fakes(3) as (door, services):
        assert {ask(door, "again") for _ in range(6)} == {200}
        assert sorted(asked(services)) == [0, 0, 6]
        for number in range(30):
            ask(door, f"question {number}")
        assert min(asked(services)) > 0
        for each in services:
            each.requests.clear()
        for number in range(6):
            ask(door, f"turn {number}", prompt_cache_key="one conversation")
        assert sorted(asked(services)) == [0, 0, 6]


def test_one_that_is_down_before_the_first_token_is_passed_over() -> None:
    with fakes(2) as (door, services):
        ask(door, "hello")
        home = next(each for each in services if each.requests)
        home.play, home.refusal = (lambda request: iter(())), DOWN
        assert ask(door, "hello") == 200
        assert asked(services) in ([2, 1], [1, 2])
        for each in services:
            each.play, each.refusal = (lambda request: iter(())), DOWN
        reply = door.post(CHAT, {"messages": [said("hello")]})
        assert (reply.status, reply.error["code"]) == (503, "STOPPING")


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_one_that_is_full_is_passed_over_and_if_all_are_the_last_says_when_to_come_again(path: str) -> None:
    with fakes(4) as (door, services):
        order: list[FakeLlm] = []

        def ask_all() -> tuple[int, str | None, str | None]:
            for each in services:
                each.requests.clear()
                each.to_embed.clear()
            reply = door.post(path, {"messages": [said("hello")]})
            order[:] = [each for each in services if each.requests or each.to_embed]
            code = None if reply.status == 200 else reply.error["code"]
            return reply.status, code, reply.headers.get("retry-after")

        assert ask_all() == (200, None, None)
        (home,) = order
        home.play, home.refusal = (lambda request: iter(())), full(reason="TOO_MANY_WAITING_TOKENS")
        assert ask_all()[0] == 200
        assert (home in order, len(order)) == (True, 2)
        (second,) = (each for each in order if each is not home)
        second.play, second.refusal = (lambda request: iter(())), full(seconds=3, reason="TOO_MANY_BYTES")
        assert ask_all()[0] == 200
        assert len(order) == 3
        for each in services:
            if each not in (home, second):
                each.play, each.refusal = (lambda request: iter(())), full(seconds=7)
        assert ask_all() == (429, "TOO_MANY_WAITING", "7")
        assert len(order) == 3


@pytest.mark.parametrize("refusal", [full(reason="REQUEST_TOO_SLOW"), full(seconds=0)], ids=["slow", "for-good"])
def test_what_is_too_much_of_the_request_itself_is_not_asked_elsewhere(refusal: Any) -> None:
    with fakes(2) as (door, services):
        for each in services:
            each.play, each.refusal = (lambda request: iter(())), refusal
        assert ask(door, "hello") == 429
        assert sum(asked(services)) == 1


@pytest.mark.parametrize("between", [{"context_tokens": 0}, {"has_engine": False}], ids=["told", "between-questions"])
def test_a_request_waits_where_an_engine_is_started_again_and_nobody_else_can_serve(between: dict[str, int]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with fakes(2) as (door, services):
        for number, each in enumerate(services, start=1):
            each.tool_format = v1.TOOL_FORMAT_UNSPECIFIED
            for name, value in between.items():
                setattr(each, name, value)
            until(lambda number=number: door.metric("llm_services_usable") == 2 - number, "one cannot serve")
            if number == 1:
                assert {ask(door, f"question {each}") for each in range(20)} == {200}
                assert asked(services) == [0, 20]
        reply = door.post(CHAT, {"messages": [said("hello")]})
        assert (reply.status, json.loads(reply.body)["model"]) == (200, "demo")
        assert ask(door, "hello", model="demo") == 200
        assert ask(door, "hello", model="another") == 404
        refused = door.post(CHAT, {"messages": [said("hello")], "tools": [tool]})
        assert refused.error["code"] == "NO_TOOLS", "what it says of itself holds"
        assert door.get("/v1/models").status == door.get("/health/ready").status == 503


def test_an_adapter_is_told_as_its_model_is_also_between_two_engines() -> None:
    call = "<tool_call>\n<function=add>\n<parameter=to>\n2\n</parameter>\n</function>\n</tool_call>"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"to": {"type": "integer"}}}}}

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text=call, token_ids=[1]))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    with fakes(1) as (door, (llm,)):
        llm.play, llm.tool_format, llm.adapters = play, v1.TOOL_FORMAT_XML, {"mine": v1.Adapter(name="mine")}
        llm.reranker = v1.Reranker(true_token_id=7, false_token_id=9)
        until(lambda: b'"mine"' in door.get("/v1/models").body, "the adapter is known")
        for usable in (1, 0):
            until(lambda usable=usable: door.metric("llm_services_usable") == usable, "it is as it should be")
            for model in ("demo", "mine"):
                reply = door.post(CHAT, {"model": model, "messages": [said("hello")], "tools": [tool]})
                (made,) = json.loads(reply.body)["choices"][0]["message"]["tool_calls"]
                assert made["function"] == {"name": "add", "arguments": '{"to": 2}'}
                door.post("/v1/rerank", {"model": model, "query": "x", "documents": ["y"], "instruction": "Judge."})
                assert llm.requests[-1].sampling.logit_bias, "it is asked as a reranker"
            llm.context_tokens = 0


def test_a_service_that_has_never_served_is_not_waited_at() -> None:
    llm = FakeLlm()
    llm.context_tokens = 0
    with serving(llm=llm) as address, gateway(address) as running:
        door = Door(running)
        until(lambda: "STARTING" in running.log.read_text(), "it was looked at")
        reply = door.post(CHAT, {"messages": [said("hello")]})
        assert (reply.status, reply.error["code"], llm.requests) == (503, "NO_LLM_SERVICE", [])


def test_a_service_that_starts_as_another_process_is_not_waited_at() -> None:
    llm = FakeLlm()
    with serving(llm=llm) as address, gateway(address) as running:
        door = Door(running)
        until(lambda: door.metric("llm_services_usable") == 1, "it serves")
        llm.context_tokens, llm.instance = 0, 8
        until(lambda: door.metric("llm_services_usable") == 0, "it starts anew")
        reply = door.post(CHAT, {"messages": [said("hello")]})
        assert (reply.status, reply.error["code"], llm.requests) == (503, "NO_LLM_SERVICE", [])


def test_what_is_wrong_with_a_request_is_not_asked_elsewhere() -> None:
    with fakes(2) as (door, services):
        for each in services:
            each.play = lambda request: iter(())
            each.refusal = (grpc.StatusCode.INVALID_ARGUMENT, v1.Status(code=3, message="no", reason="OUT_OF_RANGE"))
        assert ask(door, "hello") == 400
        assert sum(asked(services)) == 1


@pytest.mark.parametrize("reason", ["MEDIA_HOST_UNAVAILABLE", "MEDIA_CHANGED", "ENCODER_SLOW"])
def test_an_address_that_gives_nothing_or_takes_too_long_is_tried_by_one_service(reason: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "https://example.org/gone.png"}}]
    messages = [{"role": "user", "content": parts}]
    with fakes(2) as (door, services):
        for each in services:
            each.play = lambda request: iter(())
            each.refusal = (grpc.StatusCode.UNAVAILABLE, v1.Status(code=14, message="no", reason=reason))
        for path, body in {
            CHAT: {"messages": messages},
            "/v1/embeddings": {"messages": messages},
            "/v1/rerank": {"query": "x", "documents": [{"content": parts}]},
        }.items():
            for each in services:
                each.requests.clear()
                each.to_embed.clear()
            reply = door.post(path, body)
            assert (reply.status, reply.error["code"]) == (503, reason)
            pictures = [request for each in services for request in (*each.requests, *each.to_embed)]
            asked_for = len([each for each in pictures if each.HasField("chat")])
            assert asked_for == 1 or (asked_for == 0 and path == "/v1/rerank"), path  # where its query failed before


def test_one_with_much_to_do_is_passed_over() -> None:
    go_on = threading.Event()

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        go_on.wait(600)
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    with fakes(2) as (door, services):
        for each in services:
            each.play = play
        callers = [threading.Thread(target=ask, args=(door, "the same")) for _ in range(4)]
        for number, caller in enumerate(callers, start=1):
            caller.start()
            until(lambda number=number: sum(asked(services)) == number, "it is asked")
        go_on.set()
        for caller in callers:
            caller.join()
        assert sorted(asked(services)) == [1, 3]


def test_a_list_is_read_again(tmp_path: Path) -> None:
    addresses = tmp_path / "services"
    with fakes(2, addresses) as (door, _):
        first, _ = addresses.read_text().splitlines()
        addresses.write_text(first)
        until(lambda: door.metric("llm_services") == 1, "one has left the list")
        assert ask(door, "hello") == 200


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ([user("a")], [user("a"), system("later")], True),
        ([system("s"), user("a")], [system("s"), user("b")], False),
        ([system("s"), user("a")], [system("t"), user("a")], False),
        ([user(image(b"one"), "a")], [user(image(b"two"), "a")], False),
        ([user(image(b"one"), "a")], [user(image(b"one"), "a"), user(image(b"two"))], True),
    ],
)
async def test_a_conversations_later_turns_have_the_key_of_the_first(one: Any, other: Any, alike: bool) -> None:
    assert (await key_of(generate_request(one)) == await key_of(generate_request(other))) is alike
    assert await key_of(generate_request(one)) != await key_of(generate_request(one, cache_salt="mine"))


async def test_a_sound_goes_where_it_was_written_down_before() -> None:
    one, other = [await key_of(generate_request(transcription(audio(sound)))) for sound in (b"RIFF1", b"RIFF2")]
    assert one != other
    assert one == await key_of(generate_request(transcription(audio(b"RIFF1"), language="de")))
