"""What the host's memory keeps of KV blocks that were given to others: which of its places has what, and the copies
that the next step begins with. The least recently used gives way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostBlocks:
    """Places for `count` blocks, found by their identities (`block_identity`); none of them is ever written by a step.

    Copies wait for the next step: those to the host are made first. What one of them is to bring back stays until then.
    """

    def __init__(self, count: int) -> None:
        self.total = count
        self.offloaded = 0
        self.loaded = 0
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(count))
        self._offloads: list[tuple[int, int]] = []
        self._loads: dict[int, int] = {}
        self._needed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._places

    def need(self, identities: Iterable[bytes]) -> None:
        """These are going to be loaded in the next step: they stay, whatever is offloaded meanwhile."""
        self._needed.update(identities)

    def offload(self, identity: bytes, block: int) -> None:
        """A block, computed by now, is about to be given to others: the host keeps what is in it, if it has room."""
        if identity in self._places:
            self._places.move_to_end(identity)
        elif (place := self._take()) is not None:
            self._places[identity] = place
            self._offloads.append((block, place))
            self.offloaded += 1

    def load(self, identity: bytes, block: int) -> None:
        """A block is to hold again what the host has kept, and was said to be needed. If it was to be loaded with
        something else, that is not needed any more."""
        assert identity in self._needed, "somebody else may take its place"
        self._places.move_to_end(identity)
        self._loads[block] = self._places[identity]
        self.loaded += 1

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(block, place) of what is copied to the host before the next step, in this order, and then (place, block) of
        what is copied back."""
        offloads, loads = self._offloads, [(place, block) for block, place in self._loads.items()]
        self._offloads, self._loads = [], {}
        self._needed.clear()
        return offloads, loads

    def flush(self) -> int:
        """Forgets all but what is needed; the number forgotten."""
        gone = [identity for identity in self._places if identity not in self._needed]
        self._free += [self._places.pop(identity) for identity in gone]
        return len(gone)

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((identity for identity in self._places if identity not in self._needed), None)
        return None if oldest is None else self._places.pop(oldest)

    def check_integrity(self) -> None:
        """Raises AssertionError where a place is lost, or has two owners."""
        assert sorted([*self._free, *self._places.values()]) == list(range(self.total)), "a place of the host is lost"
        assert self._needed <= self._places.keys(), "what is needed is gone"
        assert set(self._loads.values()) <= {self._places[identity] for identity in self._needed}, "a place was taken"
