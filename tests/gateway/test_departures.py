"""Callers who leave or stop reading, LLM services that go away, and a gateway that is asked to stop."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from testkit.light.slow import SLOW
from tests.gateway.scripted import scripted
from tests.gateway.trio import Trio, fronted, said, trio
from tests.unit.twinlens.fakes import WORDS
from tests.waiting import until
from twinlens import v1

LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}
LASTING: dict[str, Any] = {**LONG, "logit_bias": {str(SLOW): 0.0}}
"""Of an answer that is not over before its test is."""


def request(stream: bool, **fields: Any) -> bytes:
    body = json.dumps({"messages": [said("Count")], "stream": stream, **LONG, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_caller_who_leaves_ends_the_generation(door: Trio, stream: bool) -> None:
    load = door.services.text.get_load
    until(door.idle, "nobody is still to be counted")
    before = load().cancelled_requests
    with door.connect() as connection:
        connection.sendall(request(stream, **LASTING))
        if stream:
            came = b""
            while b"assistant" not in came:  # the head of the answer may come alone
                part = connection.recv(65536)
                assert part, came
                came += part
        until(lambda: load().running == 1, "it is computed")
    until(lambda: load().cancelled_requests == before + 1, "the LLM service counts it as cancelled")
    until(door.idle, "nothing is held")
    assert door.metric('requests_total{status="499",surface="chat"}') >= 1


def test_a_client_that_will_send_no_more_is_gone(door: Trio) -> None:
    """Its FIN is all that is seen of a client that has left: to wait for more would be to compute for nobody."""
    before = door.services.text.get_load().cancelled_requests
    with door.connect() as connection:
        connection.sendall(request(False, **LASTING))
        until(lambda: door.services.text.get_load().running == 1, "it is computed")
        connection.shutdown(socket.SHUT_WR)
        until(lambda: door.services.text.get_load().cancelled_requests == before + 1, "it is cancelled")


def test_a_client_that_closes_its_stream_ends_the_generation(door: Trio) -> None:
    before = door.services.text.get_load().cancelled_requests
    with door.client.chat.completions.create(
        model=door.model,
        messages=[{"role": "user", "content": "Count"}],
        stream=True,
        extra_body=LASTING,
    ) as stream:
        next(iter(stream))
    until(lambda: door.services.text.get_load().cancelled_requests == before + 1, "it is cancelled")


def test_who_reads_nothing_holds_up_nobody_and_is_given_up(door: Trio) -> None:
    with fronted(door.services, answer_stall_seconds=1) as narrow, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = narrow.gateway.address.rpartition(":")
        connection.connect((host, int(port)))
        connection.sendall(request(True, n=8, logprobs=True, top_logprobs=20))
        until(lambda: narrow.metric("open_requests") == 1, "it is under way")
        assert narrow.chat().status == 200
        until(lambda: narrow.metric('requests_total{status="200",surface="chat"}') >= 2, "it is given up")
        until(narrow.idle, "nothing is held")
        assert "CALLER_STALLED" in narrow.gateway.log.read_text()


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_who_reads_nothing_of_a_whole_answer_is_given_up(connection: bytes) -> None:
    with scripted(answer_stall_seconds=1) as door, socket.socket() as reader:
        door.llm.vector = [0.1] * 4096  # megabytes, more than the kernel takes in
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = door.gateway.address.rpartition(":")
        reader.connect((host, int(port)))
        body = json.dumps({"input": ["x"] * 64}).encode()
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nConnection: %b\r\nContent-Length: %d\r\n\r\n"
        reader.sendall(head % (connection, len(body)) + body)
        answered = 'requests_total{status="200",surface="embeddings"}'
        until(lambda: door.metric(answered) == 1, "it is answered")
        until(lambda: door.metric("open_connections") == 1, "none is open but the one that asks")


@pytest.fixture
def mortal(checkpoints: Callable[..., Path]) -> Iterator[Trio]:
    """Three of one's own."""
    with trio(checkpoints("qwen3_vl")) as three:
        yield three


def test_a_stream_whose_llm_service_dies_ends_with_an_error() -> None:
    with scripted() as door:

        def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
            started = v1.GenerateStarted(prompt_tokens=9, resumed_choices=len(request.resume))
            yield v1.GenerateResponse(started=started)
            if not request.resume:
                yield v1.GenerateResponse(delta=v1.GenerateDelta(text="A", token_ids=[5]))

        door.llm.play = play
        status = v1.Status(code=14, message="the engine has ended", reason="ENGINE_UNAVAILABLE", retry_after_ms=1000)
        door.llm.refusal = (grpc.StatusCode.UNAVAILABLE, status)
        reply = door.post("/v1/chat/completions", {"messages": [said("x")], "stream": True})
        assert reply.status == 200
        events = reply.body.decode().split("\n\n")
        assert '"content":"A"' in events[1]
        assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "ENGINE_UNAVAILABLE"
        assert "[DONE]" not in reply.body.decode()
        with (
            openai.OpenAI(base_url=f"http://{door.gateway.address}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIError) as error,
        ):
            list(client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], stream=True))
        assert error.value.code == "ENGINE_UNAVAILABLE"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_fails_before_the_first_token_has_its_status_and_a_hint(stream: bool) -> None:
    with scripted() as door:
        door.llm.play = lambda request: iter(())
        status = v1.Status(code=8, message="full", reason="TOO_MANY_WAITING", retry_after_ms=2500)
        door.llm.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, status)
        reply = door.post("/v1/chat/completions", {"messages": [said("x")], "stream": stream})
        assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "TOO_MANY_WAITING", "rate_limit_error")
        assert (reply.headers["retry-after"], reply.headers["x-should-retry"]) == ("3", "true")


def test_metadata_go_along_and_the_deadline_is_bounded() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with scripted(request_seconds=900, llm_token="inner") as door:
        headers = {"traceparent": trace, "tracestate": "a=b", "x-request-id": "mine"}
        assert door.post("/v1/chat/completions", {"messages": [said("x")]}, headers).status == 200
        ((metadata, remaining),) = door.llm.generated_with  # the gateway asks more than that
        sent = {name: metadata[name] for name in ("traceparent", "tracestate", "authorization")}
        assert sent == {"traceparent": trace, "tracestate": "a=b", "authorization": "Bearer inner"}
        assert door.llm.requests[0].request_id == "mine"
        assert 86000 < remaining < 90000  # gRPC rounds up what it writes into the header
        assert int(str(metadata["twinlens-request-bytes"])) == door.llm.requests[0].ByteSize()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_that_takes_too_long_is_ended(stream: bool) -> None:
    with scripted(request_seconds=1 if stream else 0.5) as door:
        release = threading.Event()

        def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
            yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
            release.wait(600)

        door.llm.play = play

        def status() -> int:
            reply = door.post("/v1/chat/completions", {"messages": [said("x")], "stream": stream})
            assert b"DEADLINE_EXCEEDED" in reply.body
            return reply.status

        until(lambda: status() == (200 if stream else 504), "a stream has started in its time")
        release.set()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_gets_on_may_take_longer_than_its_first_token(stream: bool) -> None:
    with scripted(request_seconds=2) as door:
        over = threading.Event()

        def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
            yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
            until = time.monotonic() + 3
            while time.monotonic() < until:
                over.wait(0.05)
                yield v1.GenerateResponse(delta=v1.GenerateDelta(text="x", token_ids=[1]))
            yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

        door.llm.play = play
        reply = door.post("/v1/chat/completions", {"messages": [said("x")], "stream": stream})
        assert (reply.status, b"DEADLINE_EXCEEDED" in reply.body) == (200, False)


def test_an_llm_service_that_is_gone_is_noticed_and_so_is_its_return(mortal: Trio) -> None:
    assert mortal.chat().status == 200
    mortal.services.llm.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: mortal.get("/health/ready").status == 503, "the gateway is not ready")
        reply = mortal.chat()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "NO_LLM_SERVICE", "1")
    finally:
        mortal.services.llm.process.send_signal(signal.SIGCONT)
    until(lambda: mortal.chat().status == 200, "it serves again")


def test_a_signal_lets_streams_finish() -> None:
    with scripted() as door:
        asked, go_on = threading.Event(), threading.Event()

        def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
            asked.set()
            yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
            go_on.wait(600)
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text="".join(WORDS)))
            yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

        door.llm.play = play
        replies: list[Any] = []
        body = {"messages": [said("x")], "stream": True}
        caller = threading.Thread(target=lambda: replies.append(door.post("/v1/chat/completions", body)))
        caller.start()
        assert asked.wait(180)
        door.gateway.process.send_signal(signal.SIGTERM)
        until(lambda: refused(door), "it takes no new connection")
        go_on.set()
        caller.join()
        assert replies[0].body.endswith(b"data: [DONE]\n\n")
        assert "".join(WORDS).encode() in replies[0].body
        assert door.gateway.process.wait(180) == 0


def test_after_the_grace_time_streams_end_with_an_error() -> None:
    with scripted(grace_seconds=0.2) as door:
        asked, never = threading.Event(), threading.Event()

        def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
            yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
            asked.set()
            never.wait(600)

        door.llm.play = play
        replies: list[Any] = []
        body = {"messages": [said("x")], "stream": True}
        caller = threading.Thread(target=lambda: replies.append(door.post("/v1/chat/completions", body)))
        caller.start()
        assert asked.wait(180)
        door.gateway.process.send_signal(signal.SIGTERM)
        caller.join()
        never.set()
        assert b"CALL_ENDED" in replies[0].body
        assert b"[DONE]" not in replies[0].body
        assert door.gateway.process.wait(180) == 0


def refused(door: Any) -> bool:
    try:
        door.connect().close()
    except ConnectionRefusedError:
        return True
    return False
