"""How ranks find each other, and notice that one is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from llm_service.config import LlmConfig, Meeting
from llm_service.settings import Place
from llm_service.worker.network import interface_towards
from llm_service.worker.pulse import Pulse
from tests.waiting import until


def config(**given: Any) -> LlmConfig:
    return LlmConfig(model="m", tp=4, **given)


def test_one_host_needs_no_meeting() -> None:
    assert config().meeting({}) == Meeting(1, 0, "", 0)
    assert config().meeting({}).address == ""
    assert config().meeting({"WORLD_SIZE": "4", "RANK": "2"}) == Meeting(1, 0, "", 0), "not without an address"


def test_hosts_are_told_of_each_other_by_options_or_by_launchers_variables() -> None:
    launched = {"MASTER_ADDR": "a.internal", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
    assert config().meeting(launched) == Meeting(2, 1, "a.internal", 29500)
    assert config(nodes=4, node_rank=3, rendezvous="b:1").meeting({}) == Meeting(4, 3, "b", 1)
    assert config(node_rank=0, rendezvous="b:1").meeting(launched) == Meeting(2, 0, "b", 1), "options win"
    assert config(nodes=1).meeting(launched).nodes == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 2}, "--rendezvous HOST:PORT, or MASTER_ADDR"),
        ({"nodes": 2, "rendezvous": "a:b"}, "--rendezvous HOST:PORT"),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "--node-rank 2 is not below --nodes 2"),
        ({"nodes": 3, "rendezvous": "a:1"}, "--tp 4 cannot be spread evenly over 3 --nodes"),
    ],
)
def test_hosts_that_cannot_meet_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**given).meeting({})


def test_the_way_to_this_host_is_the_loopback() -> None:
    assert interface_towards("127.0.0.1", 1) == "lo"


@pytest.fixture
def place() -> Iterator[Place]:
    """Rank 0 of two, at a store that this process keeps."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        2,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listening.detach(),
    )
    yield Place(rank=0, size=2, nodes=1, host="127.0.0.1", port=port, timeout=2.0, device="cpu", model="", threads=1)
    del store


def other(place: Place) -> Place:
    return Place(**{**{f: getattr(place, f) for f in Place.__struct_fields__}, "rank": 1})


def test_a_beat_that_stands_still_ends_the_others_and_one_that_goes_on_does_not(place: Place) -> None:
    frozen, watching = Pulse(other(place)), Pulse(place)
    lost = threading.Event()
    watching.start(lost.set)
    until(lambda: int(watching._store.get("beat/0")) >= 2, "rank 0 beats")
    assert not lost.is_set()
    assert lost.wait(30)
    assert frozen._store.get("beat/1") == b"0"


def test_a_child_that_ends_badly_is_noticed_before_its_beat_is_missed(place: Place) -> None:
    class Child:
        code: int | None = None

        def poll(self) -> int | None:
            return self.code

    child = Child()
    beside, watching = Pulse(other(place)), Pulse(place, [child])
    lost, kept = threading.Event(), threading.Event()
    beside.start(kept.set)
    watching.start(lost.set)
    until(lambda: int(watching._store.get("beat/1")) >= 6, "both beat for longer than the limit")
    assert not lost.is_set()
    assert not kept.is_set()
    child.code = -9
    assert lost.wait(30)
