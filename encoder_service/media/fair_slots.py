"""Slots for work that others may draw out, shared between the hosts that it waits for and the callers that want it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

Caller = tuple[str, str]
"""A tenant's salt or, without one, the client's address."""


class FairSlots:
    """`max_slots` slots. The next waiter is that of the caller with the fewest slots, then of the host with the fewest,
    then the caller whose last slot was returned longest ago, or who has arrived since.

    With `kept_free`, a host, and a caller, gets a further slot only while it holds fewer than are free. So a lone
    caller gets half of the slots, and the next one finds some: of 16 slots, a first host gets 8, a second one 4, a
    third one 2.
    """

    def __init__(self, max_slots: int, *, kept_free: bool) -> None:
        self._free = max_slots
        self._kept_free = kept_free
        self._hosts: Counter[str] = Counter()
        self._callers: Counter[Caller] = Counter()
        self._waiting: list[_Claim] = []

    async def take(self, caller: Caller, host: str = "") -> ExitStack:
        """A slot, once there is one for this caller and host. The caller closes it, once or repeatedly."""
        claim = _Claim(caller, host)
        self._waiting.append(claim)
        self._serve()
        try:
            return await claim.slot
        except asyncio.CancelledError:
            if claim in self._waiting:
                self._waiting.remove(claim)
            elif not claim.slot.cancelled():
                claim.slot.result().close()
            raise

    def _serve(self) -> None:
        while claim := min(filter(self._may, self._waiting), key=self._held, default=None):
            self._waiting.remove(claim)
            if not claim.slot.done():  # or its caller has just left
                self._free -= 1
                self._hosts[claim.host] += 1
                self._callers[claim.caller] += 1
                slot = ExitStack()
                slot.callback(self._give_back, claim)
                claim.slot.set_result(slot)

    def _may(self, claim: _Claim) -> bool:
        return (max(self._held(claim)) if self._kept_free else 0) < self._free

    def _held(self, claim: _Claim) -> tuple[int, int]:
        return self._callers[claim.caller], self._hosts[claim.host]

    def _give_back(self, claim: _Claim) -> None:
        self._free += 1
        self._hosts -= Counter((claim.host,))  # drops hosts without slots
        self._callers -= Counter((claim.caller,))
        self._waiting.sort(key=lambda each: each.caller == claim.caller)  # behind the others
        self._serve()


class _Claim:
    def __init__(self, caller: Caller, host: str) -> None:
        self.caller = caller
        self.host = host
        self.slot: asyncio.Future[ExitStack] = asyncio.get_running_loop().create_future()
