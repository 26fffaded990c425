"""Blocks of KV cache that are kept for the next turns of sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Wanted:
    """A block that sessions want, all of one tenant: its identity depends on the tenant."""

    tenant: bytes
    sessions: set[int] = field(default_factory=set)


class RetainedBlocks:
    """Computed blocks that the next turns of sessions may need. Those that no sequence holds are evicted only when no
    other free block is left, least recently used first. Tenants are named by their root identities.

    A block is wanted until all sessions that have used it are over, whoever else uses it. The sessions of a tenant
    retain no more than its share; above it, the tenant's least recently used blocks become ordinary ones.
    """

    def __init__(self, most_per_tenant: int) -> None:
        self._most = most_per_tenant
        self._order: OrderedDict[int, None] = OrderedDict()
        self._by_tenant: dict[bytes, OrderedDict[int, None]] = {}
        self._wanted: dict[int, _Wanted] = {}
        self._by_session: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._order

    def tenant(self, number: int) -> bytes | None:
        """The tenant whose sessions want a block, in use or not; None if none does."""
        wanted = self._wanted.get(number)
        return None if wanted is None else wanted.tenant

    @property
    def wanted(self) -> Collection[int]:
        """The blocks that sessions want, those in use among them."""
        return self._wanted.keys()

    def want(self, number: int, session: int, tenant: bytes) -> None:
        """A session wants a block as long as its content stays."""
        self._wanted.setdefault(number, _Wanted(tenant)).sessions.add(session)
        self._by_session.setdefault(session, set()).add(number)

    def add(self, number: int) -> int | None:
        """Retains a block that is not in use, if a session wants it. Returns the block that is not retained: this one,
        or another if the tenant's share is full."""
        if number not in self._wanted:
            return number
        own = self._by_tenant.setdefault(self._wanted[number].tenant, OrderedDict())
        own[number] = self._order[number] = None
        if len(own) <= self._most:
            return None
        return self._give_up(next(iter(own)))

    def discard(self, number: int) -> None:
        """Stops retaining the block, which is in use again."""
        del self._order[number]
        tenant = self._wanted[number].tenant
        own = self._by_tenant[tenant]
        del own[number]
        if not own:
            del self._by_tenant[tenant]

    def forget(self, number: int) -> None:
        """No session wants the block, whose content is gone."""
        if (wanted := self._wanted.pop(number, None)) is None:
            return
        for session in wanted.sessions:
            self._by_session[session].discard(number)
            if not self._by_session[session]:
                del self._by_session[session]

    def pop(self) -> int:
        """Removes and returns the least recently used block."""
        return self._give_up(next(iter(self._order)))

    def _give_up(self, number: int) -> int:
        self.discard(number)
        self.forget(number)
        return number

    def release(self, session: int) -> list[int]:
        """Ends a session; returns the blocks that are no longer retained."""
        wanted = self._by_session.pop(session, set())
        for number in wanted:
            self._wanted[number].sessions.discard(session)
        over = {number for number in wanted if not self._wanted[number].sessions}
        numbers = [number for number in self._order if number in over]
        for number in numbers:
            self.discard(number)
        for number in over:
            del self._wanted[number]
        return numbers

    def clear(self) -> list[int]:
        """Drops all blocks that no sequence holds."""
        return [self._give_up(number) for number in list(self._order)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless a session wants each block that is retained, within its tenant's share."""
        assert self._order.keys() <= self._wanted.keys(), "a block is kept for nobody"
        assert all(len(own) <= self._most for own in self._by_tenant.values()), "a tenant has more than its share"
        assert all(each.sessions for each in self._wanted.values()), "a block is wanted by nobody"
        pairs = {(number, session) for number, each in self._wanted.items() for session in each.sessions}
        assert pairs == {(number, session) for session, own in self._by_session.items() for number in own}
