"""State slots, for models whose layers have states: one for each running sequence; the others hold snapshots, each the
state after a block's last token under that block's identity. The step that computes a state copies it, and it can be
found once the identity is known. The least valuable snapshot is evicted for a sequence or for a new snapshot."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count


class SnapshotPlace(Enum):
    """The position of a snapshot in its sequence."""

    ANSWER = auto()
    """At the end of an answer, where the next turn begins."""
    END = auto()
    """At the end of a prompt."""
    OPENING = auto()
    """After the first turns or media, including the system prompt."""
    TURN = auto()
    """After later turns or media."""
    BRANCH = auto()
    """Where another prompt was seen to differ."""


_Kind = tuple[SnapshotPlace, int]
"""A place, and how often sequences began with the snapshot, up to `_MANY`."""
_MANY = 3
_EXPECTED = {
    SnapshotPlace.ANSWER: 1.0,
    SnapshotPlace.OPENING: 1.0,
    SnapshotPlace.BRANCH: 1.0,
    SnapshotPlace.TURN: 0.2,
    SnapshotPlace.END: 0.2,
}
"""Assumed uses during as many sequences as there are slots, for kinds with no observations."""
_MEMORY = 64
"""Observations of a kind are halved when they outweigh the prior by this factor."""
_HALF = 4
"""A snapshot that was not used while this many sequences per slot began is worth half."""


@dataclass(slots=True)
class Snapshot:
    """The state after `tokens` tokens. `parent` is the last snapshot before it of the same tokens, `used` is the time
    of its last use, and `hits` counts the sequences that began with it."""

    slot: int
    tokens: int
    parent: bytes | None
    used: int
    place: SnapshotPlace
    hits: int = 0

    @property
    def kind(self) -> _Kind:
        """The kind for which reuse is learned."""
        return self.place, min(self.hits, _MANY)


class ReuseRate:
    """How often sequences begin with a snapshot of each kind, per sequence that starts while the snapshot is kept.

    Old observations count less and less. A kind without observations is assumed to be used as often as the same place
    with one use less; snapshots never used start at `_EXPECTED`.
    """

    def __init__(self, prior: int) -> None:
        self._prior = prior
        self._kept: Counter[_Kind] = Counter()
        self._seen: defaultdict[_Kind, float] = defaultdict(float)
        self._uses: defaultdict[_Kind, float] = defaultdict(float)

    def of(self, kind: _Kind) -> float:
        """Uses of one snapshot for each sequence that begins."""
        place, hits = kind
        expected = self._prior * self.of((place, hits - 1)) if hits else _EXPECTED[place]
        return (expected + self._uses[kind]) / (self._prior + self._seen[kind])

    def add(self, kind: _Kind, count: int) -> None:
        """Counts `count` more kept snapshots of a kind, or fewer if it is negative."""
        self._kept[kind] += count

    def used(self, kind: _Kind) -> None:
        """A sequence begins with one."""
        self._uses[kind] += 1

    def tick(self) -> None:
        """A sequence begins."""
        for kind, kept in self._kept.items():
            self._seen[kind] += kept
            if self._seen[kind] > _MEMORY * self._prior:
                self._seen[kind] /= 2
                self._uses[kind] /= 2


class StateSlots:
    """`total` state slots. None is read before it is written: a sequence begins with zeros or with a copy of a
    snapshot.

    A snapshot's value is the number of tokens that must be computed again without it, counted from the snapshot before
    it, times how likely it is to be used: the rate of its kind, falling with the time since its last use. All slots
    have one size, so this is the value per byte. Time is counted in sequences that start. Snapshots of blocks that a
    session keeps are evicted last: `tenant_of` names the session's tenant, and each tenant keeps at most a share of all
    slots, those used most recently.
    """

    def __init__(
        self, total: int, session_share: float = 0.0, tenant_of: Callable[[bytes], bytes | None] = lambda _: None
    ) -> None:
        self.total = total
        self._most_of_tenant = int(total * session_share)
        self._tenant_of = tenant_of
        self._free = list(reversed(range(total)))
        self._snapshots: dict[bytes, Snapshot] = {}
        self._reserved: dict[int, int] = {}
        self._in_use: set[bytes] = set()
        self._tickets = count()
        self._rate = ReuseRate(max(1, total))
        self._now = 0

    def __contains__(self, identity: bytes | None) -> bool:
        return identity in self._snapshots

    @property
    def kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._snapshots)

    @property
    def used(self) -> int:
        """Slots that sequences have."""
        return self.total - len(self._free) - len(self._snapshots) - len(self._reserved)

    def take(self) -> int:
        """A slot for a sequence that starts. There are as many slots as sequences that may run."""
        self._now += 1
        self._rate.tick()
        if self._free:
            return self._free.pop()
        # Steps run in order: copies from or to this slot by earlier steps come before its new use.
        if (slot := self._give_up(self._idle())) is not None:
            return slot
        if self._reserved:
            return self._reserved.pop(next(iter(self._reserved)))
        slot = self._give_up(list(self._in_use))
        assert slot is not None, "more sequences than slots"
        return slot

    def take_spare(self) -> int | None:
        """A free slot, or that of the least valuable snapshot; None if sequences and snapshots in use have all of
        them."""
        return self._free.pop() if self._free else self._give_up(self._idle())

    def give_back(self, slot: int) -> None:
        """Frees a slot that its sequence no longer needs."""
        self._free.append(slot)

    def find(self, identity: bytes) -> int:
        """The slot of a snapshot, which is in use until `release`."""
        snapshot = self._snapshots[identity] = self._snapshots.pop(identity)  # now the last one in order
        self._rate.used(snapshot.kind)
        self._rate.add(snapshot.kind, -1)
        snapshot.used, snapshot.hits = self._now, snapshot.hits + 1
        self._rate.add(snapshot.kind, 1)
        self._in_use.add(identity)
        return snapshot.slot

    def release(self) -> None:
        """The step that copies from snapshots in use is planned: they may be evicted again."""
        self._in_use.clear()

    def reserve(self, place: SnapshotPlace, saved: int) -> tuple[int, int] | None:
        """(ticket, slot) for a new snapshot that saves `saved` tokens; None if sequences, snapshots in use and more
        valuable ones have all slots."""
        worth = saved * self._rate.of((place, 0))
        slot = self._free.pop() if self._free else self._give_up(self._idle(), worth)
        if slot is None:
            return None
        ticket = next(self._tickets)
        self._reserved[ticket] = slot
        return ticket, slot

    def cancel(self, ticket: int) -> None:
        """Gives up a reservation; does nothing if a sequence has taken the slot."""
        if (slot := self._reserved.pop(ticket, None)) is not None:
            self._free.append(slot)

    def keep(self, ticket: int, identity: bytes, tokens: int, place: SnapshotPlace, earlier: Iterable[bytes]) -> bool:
        """Makes a reserved snapshot findable. Returns False if there is such a snapshot already, or a sequence has
        taken the slot. `earlier` are the identities before it, the last one first."""
        if identity in self._snapshots or ticket not in self._reserved:
            self.cancel(ticket)
            return False
        kept = Snapshot(self._reserved.pop(ticket), tokens, self.last_of(earlier), self._now, place)
        self._snapshots[identity] = kept
        self._rate.add(kept.kind, 1)
        return True

    def last_of(self, earlier: Iterable[bytes]) -> bytes | None:
        """The first of these identities that has a snapshot."""
        return next((each for each in earlier if each in self._snapshots), None)

    def tokens(self, identity: bytes | None) -> int:
        """The number of tokens before a snapshot's state; 0 for None."""
        return 0 if identity is None else self._snapshots[identity].tokens

    def forget(self, identity: bytes, *, unless_used: bool = False) -> None:
        """Drops a snapshot, if there is one, because its block is evicted or a later snapshot replaces it. With
        `unless_used` it stays if sequences have begun with it."""
        snapshot = self._snapshots.get(identity)
        if snapshot is not None and not (unless_used and snapshot.hits):
            self._free.append(self._remove(identity))

    def _idle(self) -> list[bytes]:
        """Snapshots that no step copies from, the least recently used first."""
        return [identity for identity in self._snapshots if identity not in self._in_use]

    def _give_up(self, identities: Iterable[bytes], below: float = float("inf")) -> int | None:
        """The slot of the least valuable of these snapshots, which is dropped; None if there is none, or its value is
        not below `below`."""
        kept = self._kept_for_sessions()
        worth = {identity: self._worth(identity) for identity in identities}
        least = min(worth, key=lambda each: (each in kept, worth[each]), default=None)
        return None if least is None or worth[least] > below else self._remove(least)

    def _kept_for_sessions(self) -> set[bytes]:
        by_tenant: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for identity in self._snapshots:
            if (tenant := self._tenant_of(identity)) is not None:
                by_tenant[tenant].append(identity)
        found: set[bytes] = set()
        for own in by_tenant.values():
            found.update(own[len(own) - self._most_of_tenant :] if self._most_of_tenant < len(own) else own)
        return found

    def _worth(self, identity: bytes) -> float:
        one = self._snapshots[identity]
        saved = one.tokens - self.tokens(one.parent)
        return saved * self._rate.of(one.kind) / (1 + (self._now - one.used) / (_HALF * self.total))

    def _remove(self, identity: bytes) -> int:
        gone = self._snapshots.pop(identity)
        self._rate.add(gone.kind, -1)
        self._in_use.discard(identity)
        for other in self._snapshots.values():
            if other.parent == identity:
                other.parent = gone.parent
        return gone.slot

    def check_integrity(self, held: list[int], tickets: list[int]) -> None:
        """Raises AssertionError unless each slot is free, a snapshot's, reserved, or in `held`; `tickets` are the
        reservations that sequences have."""
        kept = [each.slot for each in self._snapshots.values()]
        slots = sorted((*self._free, *kept, *self._reserved.values(), *held))
        assert slots == list(range(self.total)), "a state slot is lost, or has two owners"
        assert self._reserved.keys() <= set(tickets), "a slot is reserved for nobody"
        parents = {each.parent for each in self._snapshots.values()} - {None}
        assert self._in_use | parents <= self._snapshots.keys(), "a snapshot that is not kept"
