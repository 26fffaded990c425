"""KV blocks in host memory that were evicted from the device: which place holds which block, and the copies at the
start of the next step. The least recently used block is evicted, unless the front is reading it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from llm_service.engine.block_events import BlockObserver


class HostBlocks:
    """Places for `count` KV blocks in host memory, found by their identities (`block_identity`); a step never writes to
    them.

    Copies are queued for the next step, those to the host first. A block that is to be copied back keeps its place
    until then. A block that is lent, for the front to read, keeps its place until it is returned. For blocks that the
    front writes, places are reserved, which have no identity meanwhile.
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
        self._pinned: dict[bytes, int] = {}
        self._lent: Counter[bytes] = Counter()
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return len(self._places) + len(self._pinned)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._places or identity in self._pinned

    def pin(self, identities: Iterable[bytes]) -> None:
        """These blocks will be loaded in the next step, and are not evicted before."""
        for identity in identities:
            if identity not in self._pinned:
                self._pinned[identity] = self._places.pop(identity)

    def offload(self, identity: bytes, block: int) -> None:
        """A computed block is about to be evicted from the device: keeps its content if there is room."""
        if identity in self._pinned:
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
        """Loads a pinned block into a device block. If other content was to be loaded there, that is not needed any
        more."""
        self._loads[block] = self._pinned[identity]
        self.loaded += 1

    def lend(self, identity: bytes) -> int | None:
        """The place of a block, None if it has none. The block stays there until it is given back as often as it was
        lent."""
        place = self._places.get(identity, self._pinned.get(identity))
        if place is not None:
            self._lent[identity] += 1
        return place

    def give_back(self, identities: Iterable[bytes]) -> None:
        """Returns lent blocks that are no longer read."""
        for identity in identities:
            self._lent[identity] -= 1
            if not self._lent[identity]:
                del self._lent[identity]

    def reserve(self, count: int) -> list[int]:
        """Reserves places for up to `count` blocks from elsewhere, at most half of all places. The writer must wait for
        copies from these places that are under way."""
        places: list[int] = []
        while len(places) < count and len(self._reserved) < (self.total + 1) // 2:
            if (place := self._take()) is None:
                break
            places.append(place)
            self._reserved.add(place)
        return places

    def commit(self, identities: Seq[bytes], places: Seq[int]) -> None:
        """The first of these reserved places now hold blocks with these identities; the others are free again."""
        self._reserved.difference_update(places)
        for identity, place in zip(identities, places, strict=False):
            if identity in self:  # computed here meanwhile
                self._free.append(place)
            else:
                self._places[identity] = place
        self._free += places[len(identities) :]

    def take_offloads(self) -> list[tuple[int, int]]:
        """(block, place) of the copies to the host to make now, in this order."""
        offloads, self._offloads = self._offloads, []
        return offloads

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(block, place) of the copies to the host before the next step, in this order, and then (place, block) of the
        copies back."""
        offloads, loads = self.take_offloads(), [(place, block) for block, place in self._loads.items()]
        self._loads = {}
        self._places.update(self._pinned)
        self._pinned.clear()
        return offloads, loads

    def flush(self) -> list[bytes]:
        """Forgets all blocks but those pinned or lent, and returns their identities. Their pending copies do no harm:
        later copies to the same places come after them."""
        gone = [identity for identity in self._places if identity not in self._lent]
        self._free += map(self._places.pop, gone)
        for identity in gone:
            self._observer.dropped(identity)
        return gone

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((identity for identity in self._places if identity not in self._lent), None)
        if oldest is None:
            return None
        self._observer.dropped(oldest)
        return self._places.pop(oldest)

    def check_integrity(self) -> None:
        """Raises AssertionError if a place is lost or has two owners."""
        taken = [*self._places.values(), *self._pinned.values(), *self._reserved]
        assert sorted([*self._free, *taken]) == list(range(self.total)), "a place of the host is lost"
        assert not self._pinned.keys() & self._places.keys(), "a block has two places"
        assert set(self._loads.values()) <= set(self._pinned.values()), "a place was taken"
        assert all(identity in self for identity in self._lent), "what is lent was given away"
