"""What the host's memory keeps of KV blocks that were given to others: which of its places has what, and the copies
that the next step begins with. The least recently used gives way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from llm_service.engine.block_events import BlockObserver


class HostBlocks:
    """Places for `count` blocks, found by their identities (`block_identity`); none of them is ever written by a step.

    Copies wait for the next step: those to the host are made first. What one of them is to bring back stays until then.
    """

    def __init__(self, count: int, observer: BlockObserver | None = None) -> None:
        self._observer = observer or BlockObserver()
        self.total = count
        self.offloaded = 0
        self.loaded = 0
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(count))
        self._offloads: list[tuple[int, int]] = []
        self._loads: dict[int, int] = {}
        self._needed: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._places) + len(self._needed)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._places or identity in self._needed

    def need(self, identities: Iterable[bytes]) -> None:
        """These are going to be loaded in the next step: they stay, whatever is offloaded meanwhile."""
        for identity in identities:
            if identity not in self._needed:
                self._needed[identity] = self._places.pop(identity)

    def offload(self, identity: bytes, block: int) -> None:
        """A block, computed by now, is about to be given to others: the host keeps what is in it, if it has room."""
        if identity in self._needed:
            return
        if identity in self._places:
            self._places.move_to_end(identity)
            self._observer.offloaded(identity)
        elif (place := self._take()) is not None:
            self._places[identity] = place
            self._offloads.append((block, place))
            self._observer.offloaded(identity)
            self.offloaded += 1

    def load(self, identity: bytes, block: int) -> None:
        """A block is to hold again what the host has kept, and was said to be needed. If it was to be loaded with
        something else, that is not needed any more."""
        self._loads[block] = self._needed[identity]
        self.loaded += 1

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(block, place) of what is copied to the host before the next step, in this order, and then (place, block) of
        what is copied back."""
        offloads, loads = self._offloads, [(place, block) for block, place in self._loads.items()]
        self._offloads, self._loads = [], {}
        self._places.update(self._needed)
        self._needed.clear()
        return offloads, loads

    def flush(self) -> list[bytes]:
        """Forgets all but what is needed; the identities forgotten."""
        gone = list(self._places)
        for identity in gone:
            self._observer.dropped(identity)
        self._free += self._places.values()
        self._places.clear()
        return gone

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._places:
            return None
        identity, place = self._places.popitem(last=False)
        self._observer.dropped(identity)
        return place

    def check_integrity(self) -> None:
        """Raises AssertionError where a place is lost, or has two owners."""
        taken = [*self._places.values(), *self._needed.values()]
        assert sorted([*self._free, *taken]) == list(range(self.total)), "a place of the host is lost"
        assert not self._needed.keys() & self._places.keys(), "a block has two places"
        assert set(self._loads.values()) <= set(self._needed.values()), "a place was taken"
