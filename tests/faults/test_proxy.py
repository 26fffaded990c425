"""A link that damages what it carries: no token is ever wrong, and every stream ends."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from tests.faults.proxy import LyingProxy
from tests.faults.replicas import FILES, question, replicas
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, answer, idle, sharing, usable
from tests.waiting import until
from twinlens import LlmClient, TwinlensError

# Nothing is remembered, so that every picture crosses the link each time; inline, unless a test says otherwise.
FORGETFUL: dict[str, object] = {
    **LLM_FLAGS,
    "row_cache_bytes": "300KiB",
    "prefix_cache": False,
    "shared_memory": False,
}
QUESTIONS = 24


def outcomes(client: LlmClient, right: list[list[int]], count: int) -> Counter[str]:
    """What comes of asking again and again, several at once."""

    def ask(number: int) -> str:
        which = (number * 7) % len(right)
        try:
            said = answer(client, question(which)).choices[0].token_ids
        except TwinlensError as error:
            return f"{error.code.name} {error.reason}"
        return "right" if said == right[which] else f"wrong: {which}"

    with ThreadPoolExecutor(8) as threads:
        return Counter(threads.map(ask, range(count)))


@pytest.mark.parametrize(
    ("seed", "shared"),
    [pytest.param(0, False, marks=pytest.mark.soak), (2, True)],
)
def test_spoilt_events_never_make_a_wrong_token_and_every_request_ends(
    checkpoint: Path, seed: int, shared: bool
) -> None:
    """Where memory is shared, what is spoilt are the places of rows."""
    with ExitStack() as stack:
        encoders = stack.enter_context(replicas(checkpoint, 2))
        proxies = [
            stack.enter_context(LyingProxy(encoder.address, seed * 10 + n, share=0.0).running())
            for n, encoder in enumerate(encoders)
        ]
        flags = FORGETFUL | {"shared_memory": shared}
        llm = stack.enter_context(llm_server(checkpoint, *(proxy.address for proxy in proxies), **flags))
        client = stack.enter_context(LlmClient(llm.address))
        until(lambda: (sharing if shared else usable)(client, 2), "both encoders are usable")
        right = [answer(client, question(number)).choices[0].token_ids for number in range(QUESTIONS)]
        for proxy in proxies:
            proxy.share = 0.15
        found = outcomes(client, right, 120)
        assert sum(found.values()) == 120
        assert not [each for each in found if each.startswith("wrong")], found
        assert found["right"] > 60, found
        assert bool(client.get_load().rows_shared) == shared
        damage = sum((proxy.done for proxy in proxies), Counter[str]())
        assert set(damage) >= {"flip", "drop", "double", "reorder", "cut"}
        for proxy in proxies:
            proxy.share = 0.0
        until(lambda: answers(client, right), "it is well again when the link is")
        until(lambda: idle(client), "nothing is held")


def answers(client: LlmClient, right: list[list[int]]) -> bool:
    """Every question is answered as before."""
    return outcomes(client, right, len(right))["right"] == len(right)


class NoisyWire:
    """A TCP proxy: bytes towards the LLM service are flipped, held up, or end, `rate` times a megabyte."""

    def __init__(self, target: str, seed: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._random = Random(seed)
        self.rate = 0.0
        self.damaged = 0
        self.address = ""

    @contextmanager
    def running(self) -> Iterator[NoisyWire]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
            thread = threading.Thread(target=self._accept, args=(server,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _accept(self, server: socket.socket) -> None:
        connections: list[threading.Thread] = []
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                connections.append(threading.Thread(target=self._connect, args=(near,)))
                connections[-1].start()
        for connection in connections:
            connection.join()

    def _connect(self, near: socket.socket) -> None:
        """One connection, to its end."""
        with near, socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._carry, args=(far, near, True))
            back.start()
            self._carry(near, far, False)
            back.join()

    def _carry(self, source: socket.socket, sink: socket.socket, noisy: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if noisy and self._random.random() < self.rate * len(data) / 2**20:
                    self.damaged += 1
                    data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.soak
def test_a_wire_that_flips_bits_never_makes_a_wrong_token(checkpoint: Path) -> None:
    with ExitStack() as stack:
        encoders = stack.enter_context(replicas(checkpoint, 2))
        wires = [stack.enter_context(NoisyWire(each.address, n).running()) for n, each in enumerate(encoders)]
        llm = stack.enter_context(llm_server(checkpoint, *(wire.address for wire in wires), **FORGETFUL))
        client = stack.enter_context(LlmClient(llm.address))
        until(lambda: usable(client, 2), "both encoders are usable")
        right = [answer(client, question(number)).choices[0].token_ids for number in range(QUESTIONS)]
        for wire in wires:
            wire.rate = 3.0
        found = outcomes(client, right, 120)
        assert sum(found.values()) == 120
        assert not [each for each in found if each.startswith("wrong")], found
        assert sum(wire.damaged for wire in wires) > 5
        for wire in wires:
            wire.rate = 0.0
        until(lambda: answers(client, right), "it is well again when the wire is")
        assert len(FILES) == QUESTIONS
