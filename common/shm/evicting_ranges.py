"""An arena whose ranges have owners, some of which make way where there is no gap for a new range. Who is in use is
told to the arena; which go last is its policy."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from common.shm import eviction
from common.shm.arena import Range, RangeAllocator

Owner = TypeVar("Owner")


class EvictingRanges(RangeAllocator, Generic[Owner]):
    """An allocator that knows the owners of ranges, and which of these are idle: neither others nor ranges without an
    owner are evicted.

    `is_retained` says whether an idle range goes after all that are not. `evict` has an owner give its range back by
    `free`, at once.

    >>> ranges = EvictingRanges(256, evict=lambda owner: ranges.free(spans[owner]))
    >>> spans = {name: ranges.make_room(64) for name in "abcd"}
    >>> for name, span in spans.items():
    ...     ranges.own(span, name)
    >>> for name in "bcda":
    ...     ranges.let_go(spans[name])
    >>> ranges.make_room(100), list(ranges.idle)
    (Range(offset=64, size=100), ['d', 'a'])
    """

    def __init__(
        self,
        capacity: int,
        *,
        evict: Callable[[Owner], object],
        is_retained: Callable[[Owner], bool] = lambda _: False,
    ) -> None:
        super().__init__(capacity)
        self._evict = evict
        self._is_retained = is_retained
        self._owners: dict[int, Owner] = {}  # by offset
        self._last_uses: OrderedDict[int, int] = OrderedDict()  # of idle ones by offset, as numbers that grow
        self._uses = itertools.count()

    @property
    def owners(self) -> Iterator[Owner]:
        """All owners."""
        return iter(self._owners.values())

    @property
    def idle(self) -> Iterator[Owner]:
        """The owners of idle ranges, the least recently used first."""
        return (self._owners[start] for start in self._last_uses)

    @property
    def idle_count(self) -> int:
        """How many ranges are idle."""
        return len(self._last_uses)

    def owner(self, start: int) -> Owner | None:
        """Who has the range that begins at `start`; None if it has no owner, or is free."""
        return self._owners.get(start)

    def own(self, span: Range, owner: Owner) -> None:
        """Gives a range that was allocated an owner, who uses it."""
        self._owners[span.offset] = owner

    def use(self, span: Range) -> None:
        """A range that has an owner is in use."""
        self._last_uses.pop(span.offset, None)

    def let_go(self, span: Range) -> None:
        """A range that has an owner is idle from now on, and the most recently used."""
        self._last_uses[span.offset] = next(self._uses)
        self._last_uses.move_to_end(span.offset)

    def disown(self, span: Range) -> None:
        """A range has no owner any more. It stays allocated."""
        self._owners.pop(span.offset, None)
        self._last_uses.pop(span.offset, None)

    def free(self, span: Range) -> None:
        """As in `RangeAllocator`; the range has no owner any more."""
        super().free(span)
        self.disown(span)

    def make_room(self, size: int) -> Range | None:
        """Allocates a range of `size` bytes; if there is no gap, evicts neighbours (`eviction.window`). Returns None,
        and evicts nobody, if that cannot be enough."""
        if (span := self.allocate(size)) is not None:
            return span
        held = (start for start in self.starts if start not in self._last_uses)
        going = eviction.window(self, size, self._oldest(), self.last_use, held)
        for start in going:
            self._evict(self._owners[start])
        return self.allocate(size) if going else None

    def fits_around(self, span: Range, size: int) -> bool:
        """Whether `size` bytes fit where a range is, and neighbours of it, that may go."""
        return eviction.fits_around(self, span.offset, size, self.last_use)

    def last_use(self, start: int) -> eviction.LastUse | None:
        """When the range that begins at `start` was last used; None if it may not go."""
        used = self._last_uses.get(start)
        return None if used is None else (int(self._is_retained(self._owners[start])), used)

    def _oldest(self) -> Iterator[int]:
        """Where idle ranges begin: the least recently used first, and at last those that are retained."""
        retained = []
        for start in self._last_uses:
            if self._is_retained(self._owners[start]):
                retained.append(start)
            else:
                yield start
        yield from retained

    def check_integrity(self) -> None:
        """As in `RangeAllocator`, and if a free range has an owner."""
        super().check_integrity()
        assert self._owners.keys() <= {*self.starts}, "a free range has an owner"
        assert self._last_uses.keys() <= self._owners.keys(), "what is idle has no owner"
