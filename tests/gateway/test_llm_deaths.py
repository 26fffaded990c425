"""LLM services that are killed, or stopped, under streams: each answer is the undisturbed one, to the character."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.llm_replicas import Fleet, LlmReplica, Stream, fleet, question, streaming
from tests.gateway.test_departures import request
from tests.waiting import until

TOKENS = 300


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Fleet]:
    """One gateway over two services."""
    with fleet(checkpoint, gateways=1, services=2, max_handovers=50, answer_stall_seconds=600) as running:
        yield running


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(LlmReplica.kill, id="killed"),
        pytest.param(LlmReplica.stop, id="stopped", marks=pytest.mark.soak),
    ],
)
def test_streams_outlive_their_llm_services(pair: Fleet, end: Callable[[LlmReplica], None]) -> None:
    (door,) = pair.gateways
    bodies = [question(number, TOKENS) for number in range(6)]
    undisturbed = [Stream().ask(door, body).told for body in bodies]
    assert {told[-1] for told in undisturbed} == {""}
    before = door.metric('handovers_total{outcome="taken_over"}')
    with streaming(pair.gateways, [*bodies, question(0, 5 * TOKENS)]) as (*streams, long):  # which is there to be cut
        for victim in pair.services:
            pair.restart(victim, end)
    assert [stream.told for stream in streams] == undisturbed
    assert not long.failure
    assert door.metric('handovers_total{outcome="taken_over"}') > before


def test_who_reads_nothing_meanwhile_holds_up_nobody_and_misses_nothing(pair: Fleet) -> None:
    (door,) = pair.gateways
    bodies = [question(number, TOKENS) for number in range(3)]
    undisturbed = [Stream().ask(door, body).told for body in bodies]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = door.gateway.address.rpartition(":")
        slow.connect((host, int(port)))
        slow.sendall(request(True, n=4, seed=3, logprobs=True, top_logprobs=20, max_tokens=800))
        until(lambda: door.metric("open_requests") == 1, "it is under way")
        with streaming(pair.gateways, bodies) as streams:
            pair.restart(pair.services[0], LlmReplica.kill)
        assert [stream.told for stream in streams] == undisturbed
        pair.restart(pair.services[1], LlmReplica.kill)
        came = b""
        while not came.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = slow.recv(1 << 20)
            assert part, came[-1000:]
            came = came[-100:] + part


@pytest.mark.soak
def test_a_hundred_streams_through_two_gateways_outlive_services_killed_again_and_again(checkpoint: Path) -> None:
    with fleet(checkpoint, gateways=2, services=2, max_handovers=100, handover_seconds=300) as running:
        bodies = [question(number, 250) for number in range(90)]
        longer = [question(number, 2000) for number in range(10)]  # which none of 100 can begin too late to meet
        with streaming(running.gateways, bodies) as undisturbed:
            pass
        assert {stream.failure for stream in undisturbed} == {""}
        with streaming(running.gateways, [*bodies, *longer]) as streams:
            for _ in range(2):
                for victim in running.services:
                    running.restart(victim, LlmReplica.kill)
        assert [stream.told for stream in streams[: len(bodies)]] == [stream.told for stream in undisturbed]
        assert {stream.failure for stream in streams} == {""}
        handed_over = sum(door.metric('handovers_total{outcome="taken_over"}') for door in running.gateways)
        assert handed_over >= len(longer) / 4  # the first service that is killed has half of those that have not ended
        print(f"\n{len(streams)} streams, {handed_over:.0f} handovers")
