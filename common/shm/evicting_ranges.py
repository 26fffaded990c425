"""An arena whose ranges have owners, some of which make way where there is no gap for a new range. Which may go, and
which go last, is the arena's policy."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from common.shm import eviction
from common.shm.arena import Range, RangeAllocator

Owner = TypeVar("Owner")


class EvictingRanges(RangeAllocator, Generic[Owner]):
    """An allocator that knows the owners of ranges, and when each was last used. A range without an owner is never
    evicted.

    The policy: `may_go` says whether an owner's range may be given to others now, and `is_retained` whether it goes
    after all that are not. `evict` has an owner give its range back by `free`, at once.

    >>> ranges = EvictingRanges(256, may_go=lambda _: True, evict=lambda owner: ranges.free(spans[owner]))
    >>> spans = {name: ranges.make_room(64) for name in "abcd"}
    >>> for name, span in spans.items():
    ...     ranges.own(span, name)
    >>> ranges.use(spans["a"])
    >>> ranges.make_room(100), list(ranges.owners)
    (Range(offset=64, size=100), ['d', 'a'])
    """

    def __init__(
        self,
        capacity: int,
        *,
        may_go: Callable[[Owner], bool],
        evict: Callable[[Owner], object],
        is_retained: Callable[[Owner], bool] = lambda _: False,
    ) -> None:
        super().__init__(capacity)
        self._may_go = may_go
        self._evict = evict
        self._is_retained = is_retained
        self._owners: OrderedDict[int, Owner] = OrderedDict()  # by offset, the least recently used first
        self._last_uses: dict[int, int] = {}  # by offset, as numbers that grow with each use
        self._uses = itertools.count()

    @property
    def owners(self) -> Iterator[Owner]:
        """All owners, the least recently used first."""
        return iter(self._owners.values())

    def owner(self, start: int) -> Owner | None:
        """Who has the range that begins at `start`; None if it has no owner, or is free."""
        return self._owners.get(start)

    def own(self, span: Range, owner: Owner) -> None:
        """Gives a range that was allocated an owner. It is now the most recently used."""
        self._owners[span.offset] = owner
        self.use(span)

    def use(self, span: Range) -> None:
        """A range that has an owner becomes the most recently used."""
        self._owners.move_to_end(span.offset)
        self._last_uses[span.offset] = next(self._uses)

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
        held = (start for start in self.starts if self.last_use(start) is None)
        going = eviction.window(self, size, self._oldest(), self.last_use, held)
        for start in going:
            self._evict(self._owners[start])
        return self.allocate(size) if going else None

    def fits_around(self, span: Range, size: int) -> bool:
        """Whether `size` bytes fit where a range is, and neighbours of it, that may go."""
        return eviction.fits_around(self, span.offset, size, self.last_use)

    def last_use(self, start: int) -> eviction.LastUse | None:
        """When the range that begins at `start` was last used; None if it may not go."""
        owner = self._owners.get(start)
        if owner is None or not self._may_go(owner):
            return None
        return int(self._is_retained(owner)), self._last_uses[start]

    def _oldest(self) -> Iterator[int]:
        """Where ranges that may go begin: the least recently used first, and at last those that are retained."""
        retained = []
        for start, owner in self._owners.items():
            if self._may_go(owner):
                if self._is_retained(owner):
                    retained.append(start)
                else:
                    yield start
        yield from retained

    def check_integrity(self) -> None:
        """As in `RangeAllocator`, and if a free range has an owner."""
        super().check_integrity()
        assert self._owners.keys() <= {*self.starts}, "a free range has an owner"
        assert self._owners.keys() == self._last_uses.keys(), "an owner was never used"
