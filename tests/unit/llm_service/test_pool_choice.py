"""Who is asked for an item: its own encoder, by rendezvous hashing, unless that one is crowded, full or slow."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from llm_service.encoders.pool import _choose


@dataclass
class FakeReplica:
    """What the choice looks at."""

    address: str
    in_flight: int = 0
    load: int = 0
    full: bool = False
    passed_over: bool = False


def replicas(count: int) -> list[Any]:
    return [FakeReplica(f"10.0.0.{number}:7001") for number in range(count)]


ITEMS = [hashlib.sha256(b"%d" % number).digest() for number in range(3000)]


def homes(of: list[Any]) -> dict[bytes, str]:
    return {item: _choose(item, of).address for item in ITEMS}


def test_one_more_encoder_takes_its_share_and_moves_nothing_else() -> None:
    two, three = homes(replicas(2)), homes(replicas(3))
    moved = [item for item in ITEMS if two[item] != three[item]]
    assert {three[item] for item in moved} == {"10.0.0.2:7001"}
    assert 0.28 < len(moved) / len(ITEMS) < 0.39


def test_from_three_to_one_and_back_everything_is_where_it_was() -> None:
    before = homes(replicas(3))
    assert set(homes(replicas(1)).values()) == {"10.0.0.0:7001"}
    assert homes(replicas(3)) == before


def test_items_are_spread_evenly() -> None:
    counts = [list(homes(replicas(4)).values()).count(replica.address) for replica in replicas(4)]
    assert all(0.22 < count / len(ITEMS) < 0.28 for count in counts)


def test_an_encoder_with_much_to_compute_is_passed_over_for_one_with_less() -> None:
    item, both = ITEMS[0], replicas(2)
    first = _choose(item, both)
    first.load = 100_000
    assert _choose(item, both) is not first
    next(replica for replica in both if replica is not first).load = 200_000
    assert _choose(item, both) is first, "the other has more"


def test_a_full_encoder_is_asked_only_where_all_are() -> None:
    item, both = ITEMS[0], replicas(2)
    first = _choose(item, both)
    first.full = True
    assert _choose(item, both) is not first
    for replica in both:
        replica.full = True
    assert _choose(item, both) is first


def test_a_slow_encoder_is_asked_only_where_all_others_are_full_or_slow() -> None:
    item, both = ITEMS[0], replicas(2)
    first = _choose(item, both)
    (other,) = (replica for replica in both if replica is not first)
    first.passed_over = True
    assert _choose(item, both) is other
    other.in_flight = 20
    assert _choose(item, both) is other, "however much it has to do"
    other.full = True
    assert _choose(item, both) is first
    other.full, other.passed_over, other.in_flight = False, True, 0
    assert _choose(item, both) is first
