"""What the benchmark of states counts: hits of the scheduler, and of large blocks."""

from __future__ import annotations

import random

from benchmarks.state_hits import Aligned, Asked, Ours, conversations


def test_large_blocks_find_whole_multiples_alone() -> None:
    cache = Aligned(every=False)
    assert cache.hits(Asked([5] * 1200, [6] * 10)) == 0
    assert cache.hits(Asked([5] * 1200, [7] * 10)) == 1056
    assert cache.hits(Asked([5] * 1056, [7])) == 0, "the last token is computed, and the first boundary was not kept"
    every = Aligned(every=True)
    every.hits(Asked([5] * 1200, [6]))
    assert every.hits(Asked([5] * 1000, [6])) == 528
    assert every.kept == 2


def test_the_scheduler_hits_more_of_a_trace_the_more_snapshots_there_are() -> None:
    trace = [*conversations(8, 3, random.Random(2))]
    few, many = (Ours(slots) for slots in (0, 64))
    hits = [sum(map(cache.hits, trace)) for cache in (few, many)]
    assert 0 < hits[0] < hits[1] < sum(len(asked.prompt) for asked in trace)
    assert few.kept <= 8
