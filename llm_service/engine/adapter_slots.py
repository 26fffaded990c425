"""Which adapter occupies which of the workers' slots. Adapters of running sequences stay; the least recently used one
is evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable


class AdapterSlots:
    """`count` slots, each with one adapter or none; adapters are numbers from 1 on, 0 is none."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._held: OrderedDict[int, int] = OrderedDict()
        self.count = count
        self.filled = 0
        """How often one was filled."""

    def has_room(self, adapter: int, running: Collection[int]) -> bool:
        """Whether a sequence with this adapter may run beside sequences with the adapters `running`, which are
        pinned."""
        return not adapter or len({*running, adapter} - {0}) <= self.count

    def assign(self, adapters: Iterable[int], running: Collection[int]) -> list[tuple[int, int]]:
        """Gives a slot to each adapter of a step, all of which are among `running` and fit. Returns the slots to fill:
        (slot, adapter)."""
        filled: list[tuple[int, int]] = []
        for adapter in adapters:
            if adapter and adapter not in self._held:
                self._held[adapter] = self._take(running)
                filled.append((self._held[adapter], adapter))
            elif adapter:
                self._held.move_to_end(adapter)
        self.filled += len(filled)
        return filled

    def _take(self, running: Collection[int]) -> int:
        if self._free:
            return self._free.pop()
        unused = next(adapter for adapter in self._held if adapter not in running)
        return self._held.pop(unused)

    def slot(self, adapter: int) -> int:
        """The slot of an assigned adapter; -1 for no adapter."""
        return self._held[adapter] if adapter else -1

    def forget(self, adapter: int) -> None:
        """Frees the slot of an adapter that no sequence has or will have again."""
        if (slot := self._held.pop(adapter, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Marks all slots as empty."""
        self._held.clear()
        self._free = list(range(self.count))[::-1]

    def check_integrity(self) -> None:
        """Raises AssertionError unless each slot is free or has one adapter."""
        assert sorted([*self._free, *self._held.values()]) == list(range(self.count))
