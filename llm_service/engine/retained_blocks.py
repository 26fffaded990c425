"""Blocks of KV cache that are kept for a session's next turn."""

from __future__ import annotations

from collections import OrderedDict


class RetainedBlocks:
    """Free blocks that a session's next turn may want: taken when nothing else is left, the longest unused first. Each
    has its number, its session and its tenant (a root identity).

    A tenant's sessions keep no more than its share; past it, its own longest unused blocks become ordinary ones.
    """

    def __init__(self, most_per_tenant: int) -> None:
        self._most = most_per_tenant
        self._order: OrderedDict[int, bytes] = OrderedDict()
        self._by_tenant: dict[bytes, OrderedDict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._order

    def tenant(self, number: int) -> bytes | None:
        """The tenant whose session retains a block; None if there is none."""
        return self._order.get(number)

    def add(self, number: int, session: int, tenant: bytes) -> int | None:
        """Retains a block; the one that is not any longer, if the tenant's share is used up."""
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[number] = session
        self._order[number] = tenant
        if len(own) <= self._most:
            return None
        oldest = next(iter(own))
        self.discard(oldest)
        return oldest

    def discard(self, number: int) -> None:
        """Stops retaining the block: it is in use again, or has been evicted."""
        tenant = self._order.pop(number)
        own = self._by_tenant[tenant]
        del own[number]
        if not own:
            del self._by_tenant[tenant]

    def pop(self) -> int:
        """Gives up the longest unused block."""
        number = next(iter(self._order))
        self.discard(number)
        return number

    def release(self, session: int) -> list[int]:
        """The blocks of a session that is over; they are not kept any longer."""
        numbers = [number for own in self._by_tenant.values() for number, owner in own.items() if owner == session]
        for number in numbers:
            self.discard(number)
        return numbers

    def clear(self) -> list[int]:
        """Gives up all blocks."""
        numbers = list(self._order)
        self._order.clear()
        self._by_tenant.clear()
        return numbers
