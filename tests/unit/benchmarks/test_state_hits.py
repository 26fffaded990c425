"""What the benchmark of states counts: hits of the scheduler, and of large blocks."""

from __future__ import annotations

import random

import pytest

from benchmarks.state_hits import CACHES, Aligned, Asked, Every, LastUsed, Ours, Radix, conversations


def test_large_blocks_find_whole_multiples_alone() -> None:
    cache = Aligned(9)
    assert cache.hits(Asked([5] * 1200, [6] * 10)) == 0
    assert cache.hits(Asked([5] * 1200, [7] * 10)) == 1056
    assert cache.hits(Asked([5] * 1056, [7])) == 0, "the last token is computed, and the first boundary was not kept"
    every = Every(9)
    every.hits(Asked([5] * 1200, [6]))
    assert every.hits(Asked([5] * 1000, [6])) == 528
    assert every.kept == 2
    fine = Aligned(9, fine=True)
    fine.hits(Asked([5] * 1201, [6]))
    assert fine.hits(Asked([5] * 1300, [6])) == 1200


def test_a_radix_tree_finds_ends_of_prompts_and_where_they_branch() -> None:
    cache = Radix(9)
    cache.hits(Asked([5] * 200, [6] * 400))
    assert cache.hits(Asked([5] * 200 + [6] * 400 + [7], [8])) == 512, "an answer's are kept each 256"
    assert cache.hits(Asked([5] * 150, [6])) == 0
    assert cache.hits(Asked([5] * 150, [6])) == 128, "where the one before it left the first"


def test_those_used_last_are_kept() -> None:
    cache = LastUsed(2)
    for end in (1, 2, 1, 3):
        cache.keep([4] * 3, end)
    assert [cache.find([4] * 3, [end]) for end in (1, 2, 3)] == [1, 0, 3]
    assert cache.shared([4, 4, 5]) == 2


def test_the_scheduler_hits_more_of_a_trace_the_more_snapshots_there_are() -> None:
    trace = [*conversations(8, 3, random.Random(2))]
    few, many = (Ours(slots) for slots in (0, 64))
    hits = [sum(map(cache.hits, trace)) for cache in (few, many)]
    assert 0 <= hits[0] < hits[1] < sum(len(asked.prompt) for asked in trace)
    assert few.kept == 0


@pytest.mark.parametrize("system", [200, 300])
def test_no_peer_hits_more_with_as_many_states(system: int) -> None:
    trace = [*conversations(16, 3, random.Random(3), system)]
    found = {}
    for name, new in CACHES.items():
        cache = new(16)
        found[name] = sum(map(cache.hits, trace))
        assert cache.kept <= 16
    assert max(found, key=found.__getitem__) == "Twinlens"
