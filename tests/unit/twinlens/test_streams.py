"""Streams that break off: what had come is not taken for nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest

from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from twinlens import AsyncLlmClient, InterruptedStreamError, LlmClient, NotReachableError, TwinlensError, v1
from twinlens.cli import main

ROUNDS = 80


@pytest.fixture
def stuck(llm: FakeLlm) -> FakeLlm:
    """Says two words, and no more."""

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        for word in ("one", "two"):
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text=word))
        llm.ended.wait(180)

    llm.play = play
    return llm


def check(error: TwinlensError) -> None:
    assert isinstance(error, InterruptedStreamError)
    assert not isinstance(error, NotReachableError)
    assert (error.reason, error.events, error.retryable) == ("STREAM_INTERRUPTED", 2, True)
    assert "after 2 events" in error.message


def test_a_service_that_ends_in_the_middle_of_a_stream_was_there(stuck: FakeLlm) -> None:
    with ExitStack() as server:
        address = server.enter_context(serving(llm=stuck))
        with LlmClient(address) as client, client.generate("hello") as events:
            assert [next(events).delta.text for _ in range(2)] == ["one", "two"]
            server.close()
            with pytest.raises(TwinlensError) as caught:
                next(events)
            check(caught.value)


async def test_so_it_is_on_an_event_loop(stuck: FakeLlm) -> None:
    with ExitStack() as server:
        address = server.enter_context(serving(llm=stuck))
        async with AsyncLlmClient(address) as client, client.generate("hello") as events:
            assert [(await anext(events)).delta.text for _ in range(2)] == ["one", "two"]
            server.close()
            with pytest.raises(TwinlensError) as caught:
                await anext(events)
            check(caught.value)


def test_a_service_that_ends_before_the_first_event_is_not_there() -> None:
    """No gRPC server in this process: one that is stopped while a call reaches it may leave that call waiting for ever,
    deadline or not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with LlmClient(address) as client, client.generate("hello", timeout=180) as events:
            connection, _ = listener.accept()
            listener.close()
            connection.close()
            with pytest.raises(NotReachableError):
                next(events)


def says_nothing(llm: FakeLlm) -> Callable[[v1.GenerateRequest], Iterator[v1.GenerateResponse]]:
    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        llm.ended.wait(180)
        yield from ()

    return play


def test_no_call_outlives_its_deadline_where_services_stop_as_it_reaches_them() -> None:
    """gRPC's own retries left one in 20 of such calls without an end."""
    ends: list[grpc.StatusCode] = []

    def ask(client: LlmClient) -> None:
        with client.generate("hello", timeout=0.5) as events:
            asked.set()
            with pytest.raises(TwinlensError) as caught:
                next(events)
        ends.append(caught.value.code)

    for _ in range(ROUNDS):
        llm, asked = FakeLlm(), threading.Event()
        llm.play = says_nothing(llm)
        with ExitStack() as server, LlmClient(server.enter_context(serving(llm=llm))) as client:
            caller = threading.Thread(target=ask, args=(client,))
            caller.start()
            asked.wait()
            server.close()
            caller.join(180)
            assert not caller.is_alive()
    assert len(ends) == ROUNDS


def test_the_services_own_word_and_a_deadline_are_told_as_such(stuck: FakeLlm, llm_address: str) -> None:
    with LlmClient(llm_address) as client, pytest.raises(TwinlensError) as caught:
        list(client.generate("hello", timeout=0.5))
    assert (type(caught.value), caught.value.code) == (TwinlensError, grpc.StatusCode.DEADLINE_EXCEEDED)
    stuck.ended.set()
    stuck.refusal = (grpc.StatusCode.UNAVAILABLE, v1.Status(code=14, message="it stops", reason="CALL_ENDED"))
    with LlmClient(llm_address) as client, pytest.raises(TwinlensError) as caught:
        list(client.generate("hello"))
    assert (type(caught.value), caught.value.reason) == (TwinlensError, "CALL_ENDED")


def test_the_command_line_says_what_happened_below_what_had_come(
    llm: FakeLlm, llm_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="one"))
        raise RuntimeError

    llm.play = play
    assert main(["ask", "--llm", llm_address, "what?"]) == 1
    said = capsys.readouterr()
    assert said.out == "one\n"
    assert said.err.startswith("twinlens: STREAM_INTERRUPTED: the stream broke off after 1 event:")
    assert main(["ask", "--llm", llm_address, "--json", "what?"]) == 1
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert (error["reason"], error["events"]) == ("STREAM_INTERRUPTED", 1)
