"""Blocks of KV cache that are kept for the next turns of sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class RetainedBlocks:
    """Computed blocks that the next turns of sessions may need. Those that no sequence holds are evicted only when no
    other free block is left, least recently used first; each has its number and its tenant (a root identity).

    A block is retained until all sessions that have used it are over, whoever else uses it. The sessions of a tenant
    retain no more than its share; above it, the tenant's least recently used blocks become ordinary ones.
    """

    def __init__(self, most_per_tenant: int) -> None:
        self._most = most_per_tenant
        self._order: OrderedDict[int, bytes] = OrderedDict()
        self._by_tenant: dict[bytes, OrderedDict[int, None]] = {}
        self._sessions: dict[int, set[int]] = {}
        self._wanted: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._order

    def tenant(self, number: int) -> bytes | None:
        """The tenant whose sessions retain a block; None if there is none."""
        return self._order.get(number)

    @property
    def wanted(self) -> Collection[int]:
        """The blocks that sessions want, those in use among them."""
        return self._sessions.keys()

    def want(self, number: int, session: int) -> None:
        """A session wants a block, which is in use, as long as its content stays."""
        self._sessions.setdefault(number, set()).add(session)
        self._wanted.setdefault(session, set()).add(number)

    def add(self, number: int, tenant: bytes) -> int | None:
        """Retains a block that is no longer in use, if a session wants it. Returns the block that is not retained: this
        one, or another if the tenant's share is full."""
        if number not in self._sessions:
            return number
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[number] = None
        self._order[number] = tenant
        if len(own) <= self._most:
            return None
        return self._give_up(next(iter(own)))

    def discard(self, number: int) -> None:
        """Stops retaining the block, which is in use again."""
        tenant = self._order.pop(number)
        own = self._by_tenant[tenant]
        del own[number]
        if not own:
            del self._by_tenant[tenant]

    def forget(self, number: int) -> None:
        """No session wants the block, whose content is gone."""
        for session in self._sessions.pop(number, ()):
            self._wanted[session].discard(number)
            if not self._wanted[session]:
                del self._wanted[session]

    def pop(self) -> int:
        """Removes and returns the least recently used block."""
        return self._give_up(next(iter(self._order)))

    def _give_up(self, number: int) -> int:
        self.discard(number)
        self.forget(number)
        return number

    def release(self, session: int) -> list[int]:
        """Ends a session; returns the blocks that are no longer retained."""
        for number in (wanted := self._wanted.pop(session, set())):
            self._sessions[number].discard(session)
            if not self._sessions[number]:
                del self._sessions[number]
        numbers = [number for number in self._order if number in wanted and number not in self._sessions]
        for number in numbers:
            self.discard(number)
        return numbers

    def clear(self) -> list[int]:
        """Drops all blocks that no sequence holds."""
        return [self._give_up(number) for number in list(self._order)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless a session wants each block that is retained, within its tenant's share."""
        assert self._order.keys() <= self._sessions.keys(), "a block is kept for nobody"
        assert all(len(own) <= self._most for own in self._by_tenant.values()), "a tenant has more than its share"
        pairs = {(number, session) for number, sessions in self._sessions.items() for session in sessions}
        assert pairs == {(number, session) for session, wanted in self._wanted.items() for number in wanted}
