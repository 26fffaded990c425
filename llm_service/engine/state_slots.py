"""Slots of states, for a model whose layers keep them: one for each sequence that runs, snapshots in the others.

A snapshot is the state after a block's last token, kept under that block's identity: copied by the step that computes
it, and found once the identity is known. The one worth least gives way to a sequence, or to a new one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class Snapshot:
    """The state after so many `tokens`. `parent` is the last snapshot before it of the same tokens, `used` the time of
    its last use, and `hits` how often something has begun with it."""

    slot: int
    tokens: int
    parent: bytes | None
    used: int
    hits: int = 0


class StateSlots:
    """`total` slots. None is read before it is written: a sequence begins with zeros, or with a snapshot's copy.

    A snapshot is worth the tokens that would be computed again without it, from the one before it on, over its age.
    All slots have the same size, so this is worth for each byte. Time is counted in uses of snapshots. Those whose
    blocks a session keeps go last: `tenant_of` says whose, and of each tenant they are no more than a share of all
    slots, those used last.
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
        """A slot for a sequence. No more sequences run than there are slots."""
        if self._free:
            return self._free.pop()
        # Steps run one after the other: whatever one of them copies from or to this slot comes before its new use.
        if (slot := self._give_up(self._snapshots.keys() - self._in_use)) is not None:
            return slot
        if self._reserved:
            return self._reserved.pop(next(iter(self._reserved)))
        slot = self._give_up(self._in_use)
        assert slot is not None, "more sequences than slots"
        return slot

    def take_spare(self) -> int | None:
        """One that is free, or that of the snapshot worth least; None where sequences, and snapshots in use, have
        all."""
        return self._free.pop() if self._free else self._give_up(self._snapshots.keys() - self._in_use)

    def give_back(self, slot: int) -> None:
        """Its sequence runs no longer, or needs it no longer."""
        self._free.append(slot)

    def find(self, identity: bytes) -> int:
        """The slot of a snapshot, which is in use until `release`."""
        snapshot = self._snapshots[identity]
        snapshot.used, snapshot.hits = self._tick(), snapshot.hits + 1
        self._in_use.add(identity)
        return snapshot.slot

    def release(self) -> None:
        """The step is planned that copies from those in use."""
        self._in_use.clear()

    def reserve(self) -> tuple[int, int] | None:
        """(ticket, slot) for a new snapshot; None where sequences, and snapshots in use, have all slots."""
        if (slot := self.take_spare()) is None:
            return None
        ticket = next(self._tickets)
        self._reserved[ticket] = slot
        return ticket, slot

    def cancel(self, ticket: int) -> None:
        """What was reserved is not kept; nothing happens where a sequence has taken the slot."""
        if (slot := self._reserved.pop(ticket, None)) is not None:
            self._free.append(slot)

    def keep(self, ticket: int, identity: bytes, tokens: int, earlier: Iterable[bytes]) -> bool:
        """Lets others find what was reserved. False where there is this snapshot already, or a sequence has taken the
        slot. `earlier` are the identities before it, the last one first."""
        if identity in self._snapshots or ticket not in self._reserved:
            self.cancel(ticket)
            return False
        parent = next((each for each in earlier if each in self._snapshots), None)
        self._snapshots[identity] = Snapshot(self._reserved.pop(ticket), tokens, parent, self._tick())
        return True

    def forget(self, identity: bytes, *, unless_used: bool = False) -> None:
        """Gives up a snapshot, if there is one: its block is not cached any more, or a later one replaces it, in which
        case it stays where others have begun with it."""
        snapshot = self._snapshots.get(identity)
        if snapshot is not None and not (unless_used and snapshot.hits):
            self._free.append(self._remove(identity))

    def _give_up(self, identities: Iterable[bytes]) -> int | None:
        """The slot of the one that is worth least; None where there are none."""
        kept, worth = self._kept_for_sessions(), self._worth()
        least = min(identities, key=lambda identity: (identity in kept, worth(identity)), default=None)
        return None if least is None else self._remove(least)

    def _kept_for_sessions(self) -> set[bytes]:
        by_tenant: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for identity in self._snapshots:
            if (tenant := self._tenant_of(identity)) is not None:
                by_tenant[tenant].append(identity)
        found: set[bytes] = set()
        for own in by_tenant.values():
            own.sort(key=lambda identity: self._snapshots[identity].used)
            found.update(own[len(own) - self._most_of_tenant :] if self._most_of_tenant < len(own) else own)
        return found

    def _worth(self) -> Callable[[bytes], tuple[float, int]]:
        def worth(identity: bytes) -> tuple[float, int]:
            one = self._snapshots[identity]
            before = self._snapshots[one.parent].tokens if one.parent is not None else 0
            return (one.tokens - before) / (1 + self._now - one.used), one.used

        return worth

    def _remove(self, identity: bytes) -> int:
        gone = self._snapshots.pop(identity)
        self._in_use.discard(identity)
        for other in self._snapshots.values():
            if other.parent == identity:
                other.parent = gone.parent
        return gone.slot

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def check_integrity(self, held: list[int], tickets: list[int]) -> None:
        """Raises AssertionError unless each slot is free, a snapshot's, reserved, or one of those that sequences have;
        `tickets`: those that sequences have as well."""
        kept = [each.slot for each in self._snapshots.values()]
        slots = sorted((*self._free, *kept, *self._reserved.values(), *held))
        assert slots == list(range(self.total)), "a state slot is lost, or has two owners"
        assert self._reserved.keys() <= set(tickets), "a slot is reserved for nobody"
        parents = {each.parent for each in self._snapshots.values()} - {None}
        assert self._in_use | parents <= self._snapshots.keys(), "a snapshot that is not kept"
