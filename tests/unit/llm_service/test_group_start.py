"""How ranks find each other, and notice that one is lost."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

from common.process.status import HELD_UP_SECONDS
from llm_service.config import LlmConfig, Meeting
from llm_service.settings import RankPlace
from llm_service.worker import heartbeat
from llm_service.worker.heartbeat import Heartbeat, PlaceTakenError
from llm_service.worker.ranks import Ranks, interface_towards, join
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
def place() -> Iterator[RankPlace]:
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
    yield RankPlace(
        rank=0, size=2, nodes=1, host="127.0.0.1", port=port, timeout=2.0, device="cpu", model="", threads=1
    )
    del store


def other(place: RankPlace) -> RankPlace:
    return RankPlace(**{**{f: getattr(place, f) for f in RankPlace.__struct_fields__}, "rank": 1})


def test_a_beat_that_stands_still_ends_the_others_and_one_that_goes_on_does_not(place: RankPlace) -> None:
    frozen, watching = Heartbeat(other(place)), Heartbeat(place)
    first, lost = frozen._store.get("beat/1"), threading.Event()
    watching.start(lost.set)
    until(lambda: int(watching._store.get("beat/0")) >= 2, "rank 0 beats")
    assert lost.wait(180)
    assert frozen._store.get("beat/1") == first


def test_ranks_that_have_not_come_yet_are_not_lost(place: RankPlace) -> None:
    place = msgspec.structs.replace(place, size=4)
    here, watching = Heartbeat(other(place)), Heartbeat(place)
    lost, left = threading.Event(), threading.Event()
    here.start(left.set)
    watching.start(lost.set)
    until(lambda: int(watching._store.get("beat/0")) >= 6, "it watches for longer than the limit")
    assert not lost.is_set()
    assert not left.is_set()
    frozen = Heartbeat(msgspec.structs.replace(place, rank=3))
    assert lost.wait(180)
    assert not watching._store.check(["beat/2"])
    del frozen


class _Left(Exception):
    """Instead of the end of this process."""


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Ranks wait for each other without end; set once this process would end. `Ranks` then raises."""
    ended = threading.Event()

    def wait(*_given: object, **_more: object) -> None:
        assert ended.wait(180), "nothing is noticed while ranks wait for each other"
        raise _Left

    monkeypatch.setattr(heartbeat.os, "_exit", lambda _: ended.set())
    monkeypatch.setattr("torch.distributed.init_process_group", wait)
    return ended


def store_of(place: RankPlace) -> TCPStore:
    return TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=30))


def test_a_child_that_ends_before_all_have_met_ends_the_group(place: RankPlace, meeting: threading.Event) -> None:
    with pytest.raises(_Left):
        Ranks(place, store_of(place), [SimpleNamespace(pid=0, poll=lambda: -9)])


def test_a_rank_of_another_host_that_is_silent_before_all_have_met_ends_the_group(
    place: RankPlace, meeting: threading.Event
) -> None:
    """Rank 1 has joined, rank 2 has not come yet."""
    place = msgspec.structs.replace(place, size=3, nodes=3)
    joined = Heartbeat(other(place))
    with pytest.raises(_Left):
        Ranks(place, store_of(place))
    del joined


def test_a_place_is_taken_once_and_who_finds_it_taken_is_no_beat_of_it(place: RankPlace) -> None:
    taken = Heartbeat(other(place))
    before = taken._store.get("beat/1")
    with pytest.raises(PlaceTakenError):
        join(other(place))
    assert taken._store.get("beat/1") == before


def test_a_child_that_ends_badly_is_noticed_before_its_beat_is_missed(
    place: RankPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, object]] = []
    monkeypatch.setattr(heartbeat, "_log", SimpleNamespace(error=lambda event, **values: said.append(values)))

    class Child:
        pid = 0
        code: int | None = None

        def poll(self) -> int | None:
            return self.code

    child = Child()
    beside, watching = Heartbeat(other(place)), Heartbeat(place, [child])
    lost, kept = threading.Event(), threading.Event()
    beside.start(kept.set)
    watching.start(lost.set)
    until(lambda: int(watching._store.get("beat/1")) >= 6, "both beat for longer than the limit")
    assert not lost.is_set()
    assert not kept.is_set()
    child.code = -9
    assert lost.wait(180)
    assert said == [{"rank": "beat/1", "status": "killed by SIGKILL"}]


def test_a_rank_that_beats_just_when_it_is_looked_at_is_not_lost(
    place: RankPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got a core at last, beats, and sleeps again, after its beat was read and before its process is looked at."""
    place = msgspec.structs.replace(place, timeout=0.1)
    slow, beats, enough, lost = Heartbeat(other(place)), itertools.count(1), threading.Event(), threading.Event()

    def beat(_: int) -> bool:
        slow._store.set("beat/1", str(count := next(beats)))
        if count == 3:
            enough.set()
        return False

    monkeypatch.setattr(heartbeat, "is_held_up", beat)
    Heartbeat(place, [SimpleNamespace(pid=1, poll=lambda: None)]).start(lambda: (lost.set(), enough.set()))
    assert enough.wait(180)
    assert not lost.is_set()


def test_a_rank_of_this_host_that_is_held_up_gets_more_time_and_not_without_end(
    place: RankPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {os.getpid(): True}
    monkeypatch.setattr(heartbeat, "is_held_up", lambda pid: states.get(pid, False))
    children = [SimpleNamespace(pid=os.getpid(), poll=lambda: None), SimpleNamespace(pid=0, poll=lambda: None)]
    watching = Heartbeat(place, children)
    assert not watching._is_lost("beat/1", place.timeout)
    assert not watching._is_lost("beat/1", place.timeout + 1)
    assert watching._is_lost("beat/1", HELD_UP_SECONDS + 1)
    assert watching._is_lost("beat/2", place.timeout + 1), "it is stopped"
    assert watching._is_lost("beat/3", place.timeout + 1), "it is on another host"
    states[os.getpid()] = False
    assert watching._is_lost("beat/1", place.timeout + 1)


def test_a_rank_knows_the_first_one_as_its_parent_on_the_first_host_alone(
    place: RankPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "is_held_up", lambda pid: pid == os.getppid())
    assert not Heartbeat(other(place))._is_lost("beat/0", place.timeout + 1)
    elsewhere = msgspec.structs.replace(place, rank=2, size=4, nodes=2)
    assert Heartbeat(elsewhere)._is_lost("beat/0", place.timeout + 1)
