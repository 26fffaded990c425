"""Bodies of sixty megabytes, good and bad: what they cost is bounded, and given back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.scripted import Scripted, scripted
from tests.gateway.test_refusals import answered
from tests.gateway.trio import Reply, data_url, said
from tests.soak.mixed_load import own_memory
from tests.waiting import until
from twinlens import v1

CHAT = "/v1/chat/completions"
SIZE = 60_000_000
CONTENT = SIZE * 3 // 4
"""What so much base64 says."""
MIB = 1 << 20
BAD: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "no JSON": (lambda: b"x" * SIZE, 400, "BAD_JSON"),
    "JSON that breaks off": (lambda: b'{"messages":[{"role":"user","content":"' + b"x" * SIZE, 400, "BAD_JSON"),
    "brackets": (lambda: b'{"messages":' + b"[" * SIZE, 413, "BODY_TOO_COMPLEX"),
    "commas": (lambda: b'{"messages":[' + b"1," * (SIZE // 2), 413, "BODY_TOO_COMPLEX"),
    "a text for a list": (lambda: b'{"messages":"' + b"x" * SIZE + b'"}', 400, "BAD_FIELD"),
    "a field that nobody knows": (lambda: b'{"' + b"x" * SIZE + b'":1}', 400, "BAD_FIELD"),
    "a number": (lambda: b'{"messages":[' + b"1" * SIZE + b"]}", 400, "BAD_JSON"),
    "more than is taken": (lambda: b" " * (65 * MIB), 413, "BODY_TOO_LARGE"),
}


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


def peak(door: Scripted) -> int:
    """The most bytes that the gateway has had resident so far."""
    status = Path(f"/proc/{door.gateway.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


OFTEN = ("no JSON", "brackets", "a text for a list", "more than is taken")
"""One for each reason that a body of this size is refused for, in each run of the suite."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.soak) for name in BAD])
def test_a_large_body_that_is_none_is_refused_and_leaves_nothing_behind(door: Scripted, name: str) -> None:
    make, status, code = BAD[name]
    before = own_memory(door.gateway)
    reply = door.post(CHAT, make())
    assert (reply.status, reply.error["code"]) == (status, code)
    assert len(reply.body) < 1000
    assert not door.llm.requests
    assert peak(door) - before < 6 * SIZE
    until(lambda: own_memory(door.gateway) - before < SIZE / 4, "its memory is given back")


def test_what_is_handed_on_is_held_for_a_handover_alone_and_within_its_bound() -> None:
    go_on = threading.Event()
    picture = {"type": "image_url", "image_url": {"url": data_url(bytes(CONTENT), "image/png")}}
    body = json.dumps({"messages": [said(picture, {"type": "text", "text": "x"})], "stream": True}).encode()

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        go_on.wait(600)
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    with scripted(max_kept_bytes="75MiB") as door:
        door.llm.play = play
        before = own_memory(door.gateway)
        replies: list[Reply] = []
        callers = [threading.Thread(target=lambda: replies.append(door.post(CHAT, body))) for _ in range(4)]
        for number, caller in enumerate(callers, start=1):
            caller.start()
            until(lambda number=number: len(door.llm.requests) == number, "it is asked")
            until(lambda: door.metric("body_bytes") == 0, "its body is handed on")
        assert CONTENT < door.metric("kept_request_bytes") < 75 * MIB  # one of the four
        until(lambda: own_memory(door.gateway) - before < 1.5 * CONTENT, "the others are not held")
        go_on.set()
        for caller in callers:
            caller.join()
        assert [reply.body.endswith(b"[DONE]\n\n") for reply in replies] == [True] * 4
        until(lambda: own_memory(door.gateway) - before < 0.5 * SIZE, "nothing is held")
        assert door.metric("kept_request_bytes") == 0


def test_a_body_that_dribbles_has_no_longer_than_a_request() -> None:
    with scripted(request_seconds=1, request_stall_seconds=60) as door, door.connect() as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n{"
        )
        over = threading.Event()

        def dribble() -> None:
            try:
                while not over.wait(0.05):
                    connection.sendall(b" ")
            except OSError:
                pass

        sender = threading.Thread(target=dribble)
        sender.start()
        status, _, body = answered(connection)
        over.set()
        sender.join()
        assert (status, json.loads(body)["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
        until(lambda: door.metric("body_bytes") == 0, "its bytes are given back")


@pytest.mark.parametrize(
    ("path", "prompts", "shared"),
    [
        ("completions", "prompt", "guided_grammar"),
        ("completions", "prompt", "stop"),
        ("embeddings", "input", "cache_salt"),
    ],
)
def test_what_prompts_share_counts_with_each_of_them(path: str, prompts: str, shared: str) -> None:
    with scripted(max_body_bytes=100_000) as narrow:
        for count, status in ((1, 200), (2, 200), (4, 413)):
            body = {prompts: ["x"] * count, shared: "x" * 30_000}
            reply = narrow.post(f"/v1/{path}", body)
            assert reply.status == status
            assert len(narrow.llm.requests) + len(narrow.llm.to_embed) == (count if status == 200 else 0)
            narrow.llm.requests.clear()
            narrow.llm.to_embed.clear()
        assert reply.error["code"] == "BODY_TOO_LARGE"
