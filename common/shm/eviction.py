"""Which ranges of an arena are evicted for a large one: old adjacent ones, rather than the oldest wherever they are."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from common.shm.arena import Range, RangeAllocator, aligned

LastUse = tuple[int, int]
"""A class, lower ones are evicted first, and within it a number that grows with each use."""

_TRIES = 8
"""How many of the least recently used are tried; more only if a range of another class would have to go, or if so many
are in vain: then those left that have room around them are tried."""


def window(
    ranges: RangeAllocator,
    size: int,
    oldest: Iterable[int],
    last_use: Callable[[int], LastUse | None],
    held: Iterable[int],
) -> list[int]:
    """Where the ranges begin that are to be freed so that `size` bytes fit: neighbours, of which the one that was used
    last was used the longest ago. None, where nothing that may go is enough.

    `oldest` are those that may go, the least recently used first; the others, of which there is no `last_use`, are
    `held`, in any order. That is asked for only where the search is long: it may be a generator.

    >>> ranges = RangeAllocator(256)
    >>> starts = [ranges.allocate(64).offset for _ in range(4)]
    >>> used = {0: (0, 1), 192: (0, 2), 64: (0, 3), 128: (0, 4)}
    >>> window(ranges, 64, used, used.get, []), window(ranges, 128, used, used.get, [])
    ([0], [0, 64])
    """
    best: tuple[LastUse, int, list[int]] | None = None
    roomy: _Roomy | None = None
    tries = vain = 0
    for start in oldest:
        if roomy is not None and start not in roomy:
            continue
        used = last_use(start)
        assert used is not None, "what is tried may go"
        if best and (best[0] < used or (tries >= _TRIES and best[0][0] <= used[0])):
            break  # whatever it is part of was used later than the best, or is hardly worth the search
        tries += 1
        found = _Around(ranges, start, size, last_use).best()
        vain += found is None
        if found is not None and (best is None or found < best):
            best = found
        if vain == _TRIES and roomy is None:
            roomy = _Roomy(ranges, size, held)
            if not roomy.begins:
                break
    return best[2] if best else []


def fits_around(ranges: RangeAllocator, start: int, size: int, last_use: Callable[[int], LastUse | None]) -> bool:
    """Whether a range that may go is part of a `window`: a look at its neighbours, and not at all that may go."""
    return _Around(ranges, start, size, last_use).best() is not None


def lightest(ranges: RangeAllocator, size: int, weight: Callable[[int], int]) -> tuple[Range, list[int]]:
    """Where `size` bytes will fit once neighbours are free whose `weight`s are the least in sum, and where those begin.
    All may go, so there is always one, where the arena is large enough; there must be no gap that is.

    >>> ranges = RangeAllocator(256)
    >>> starts = [ranges.allocate(64).offset for _ in range(4)]
    >>> lightest(ranges, 100, {0: 0, 64: 2, 128: 1, 192: 0}.__getitem__)
    (Range(offset=128, size=128), [128, 192])
    """
    need, starts = aligned(size), ranges.starts
    weights, ends = list(map(weight, starts)), ranges.ends(starts)
    best: tuple[int, Range, list[int]] | None = None
    begin = first = total = 0  # `total` is what ranges from `first` on weigh, which would leave room from `begin` on
    for last, end in enumerate([*starts[1:], ranges.capacity]):
        total += weights[last]
        while first < last and end - ends[first] >= need:
            begin, total, first = ends[first], total - weights[first], first + 1
        if end - begin >= need and (best is None or total < best[0]):
            best = total, Range(begin, max(need, ends[last] - begin)), starts[first : last + 1]
    assert best is not None, "the arena is too small, or empty"
    return best[1:]


class _Roomy:
    """Where `size` bytes fit between two neighbours that may not go: from one of `begins` to the end beside it."""

    def __init__(self, ranges: RangeAllocator, size: int, held: Iterable[int]) -> None:
        in_order = sorted(held)
        begins, ends = [0, *ranges.ends(in_order)], [*in_order, ranges.capacity]
        found = [(begin, end) for begin, end in zip(begins, ends, strict=True) if end - begin >= size]
        self.begins = [begin for begin, _ in found]
        self._ends = [end for _, end in found]

    def __contains__(self, start: int) -> bool:
        at = bisect.bisect_right(self.begins, start) - 1
        return at >= 0 and start < self._ends[at]


class _Around:
    """The neighbours of a range that may go with it, to both sides, as far as `size` bytes reach."""

    def __init__(
        self, ranges: RangeAllocator, start: int, size: int, last_use: Callable[[int], LastUse | None]
    ) -> None:
        self._size = size
        self._begin, self._end = start, ranges.end(start)
        self._at = bisect.bisect_left(ranges.starts, start)
        self._ranges = ranges
        self._last_use = last_use
        self._left = self._reach(-1)
        self._right = self._reach(1)

    def best(self) -> tuple[LastUse, int, list[int]] | None:
        """The window that was used the longest ago: when, its bytes, and what is in it."""
        best, right = None, 0
        for left in reversed(range(len(self._left))):
            begin, before = self._left[left]
            while right < len(self._right) and self._right[right][0] - begin < self._size:
                right += 1
            if right == len(self._right):
                break
            end, behind = self._right[right]
            found = (max(before, behind), end - begin, left, right)
            best = min(best or found, found)
        return best and (best[0], best[1], self._between(*best[2:]))

    def _between(self, left: int, right: int) -> list[int]:
        return self._ranges.starts[self._at - left : self._at + right + 1]

    def _reach(self, step: int) -> list[tuple[int, LastUse]]:
        """For none, one, two … neighbours to one side: how far the room goes once they are free, and when the last of
        them was used."""
        starts, at = self._ranges.starts, self._at
        newest = self._last_use(starts[at])
        reached: list[tuple[int, LastUse]] = []
        while newest is not None:
            at += step
            inside = 0 <= at < len(starts)
            edge = (starts[at] if step > 0 else self._ranges.end(starts[at])) if inside else self._border(step)
            reached.append((edge, newest))
            if not inside or (edge - self._begin if step > 0 else self._end - edge) >= self._size:
                break
            used = self._last_use(starts[at])
            newest = used and max(newest, used)
        return reached

    def _border(self, step: int) -> int:
        return self._ranges.capacity if step > 0 else 0
