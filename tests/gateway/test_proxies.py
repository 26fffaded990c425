"""Two gateways behind the proxies of docs/operations/proxies.md: streams that are not held back, deaths, and drains."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gateway.proxies import Proxy, program_of, proxy
from tests.gateway.trio import Door, said
from tests.launch import gateway
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from tests.waiting import until
from twinlens import v1

BODY = {"messages": [said("x")]}


@dataclass(eq=False)
class Stream:
    """An answer that comes in two parts, and what came of it; `broken` says how it ended before its time."""

    proxy: Proxy
    came: bytes = b""
    broken: str = ""
    begun: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        """Asks, in a thread."""
        thread = threading.Thread(target=self._read)
        thread.start()
        return thread

    def _read(self) -> None:
        connection = http.client.HTTPSConnection("127.0.0.1", self.proxy.port, timeout=600, context=self.proxy.trust)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({**BODY, "stream": True}))
            answer = connection.getresponse()
            assert answer.status == 200
            while part := answer.read1():
                self.came += part
                if b"first" in self.came:
                    self.begun.set()
        except (OSError, http.client.HTTPException) as error:
            self.broken = repr(error)
        finally:
            connection.close()


@dataclass(eq=False)
class Site:
    """Two gateways, a proxy before them, and an LLM service whose streams stop in the middle until they may go on."""

    proxy: Proxy
    doors: list[Door]
    go_on: threading.Event

    def ask(self) -> int:
        """The status of a whole answer."""
        connection = http.client.HTTPSConnection("127.0.0.1", self.proxy.port, timeout=600, context=self.proxy.trust)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({**BODY, "max_tokens": 1}))
            return connection.getresponse().status
        finally:
            connection.close()

    def streams(self) -> tuple[list[Stream], list[threading.Thread]]:
        """One stream through each gateway, of which the first part has come."""
        streams = [Stream(self.proxy) for _ in self.doors]
        threads = [stream.start() for stream in streams]
        for stream in streams:
            assert stream.begun.wait(600), stream.broken
        assert [door.metric("open_requests") for door in self.doors] == [1, 1]
        return streams, threads


@contextmanager
def site(kind: str, folder: Path) -> Iterator[Site]:
    program = program_of(kind)  # before anything is started in vain
    llm, go_on = FakeLlm(), threading.Event()

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="first "))
        if not request.sampling.HasField("max_tokens"):
            go_on.wait(600)
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="last"))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    llm.play = play
    with ExitStack() as stack:
        address = stack.enter_context(serving(llm=llm))
        doors = [Door(stack.enter_context(gateway(address, exit_code=None, fork=False))) for _ in range(2)]
        for door in doors:
            until(lambda door=door: door.get("/health/ready").status == 200, "a gateway is ready")
        in_front = stack.enter_context(proxy(kind, program, [door.gateway.address for door in doors], folder))
        stack.callback(go_on.set)
        running = Site(in_front, doors, go_on)
        until(lambda: running.ask() == 200, "the proxy has found a gateway")
        yield running


def ended_well(stream: Stream) -> bool:
    return not stream.broken and b"last" in stream.came and stream.came.endswith(b"data: [DONE]\n\n")


@pytest.fixture(params=["nginx", "haproxy"])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site(request.param, tmp_path) as running:
        yield running


def test_a_killed_gateway_takes_its_own_connections_along_and_no_others(running: Site) -> None:
    streams, threads = running.streams()  # what has come of them was not held back
    assert not any(b"last" in stream.came for stream in streams)
    running.doors[0].gateway.process.send_signal(signal.SIGKILL)
    until(lambda: sum(not thread.is_alive() for thread in threads) == 1, "its stream has ended")
    assert {running.ask() for _ in range(6)} == {200}
    running.go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(map(ended_well, streams)) == [False, True]


def test_a_gateway_that_drains_finishes_its_streams_and_is_given_no_more(running: Site) -> None:
    streams, threads = running.streams()
    leaving = running.doors[0].gateway
    kept = http.client.HTTPConnection(leaving.address, timeout=600)
    assert _version(kept) == (200, None)
    leaving.process.send_signal(signal.SIGTERM)
    assert {running.ask() for _ in range(6)} == {200}
    until(lambda: _refused(running.doors[0]), "no connection is accepted")
    assert _version(kept) == (200, "close")  # whoever had sent it could not send it elsewhere
    kept.close()
    running.go_on.set()
    for thread in threads:
        thread.join()
    assert all(map(ended_well, streams))
    assert leaving.process.wait(180) == 0


def _version(connection: http.client.HTTPConnection) -> tuple[int, str | None]:
    connection.request("GET", "/version")
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


def _refused(door: Door) -> bool:
    try:
        door.connect().close()
    except ConnectionRefusedError:
        return True
    return False
