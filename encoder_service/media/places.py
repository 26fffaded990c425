"""Places of which there are few, for work that others may draw out: shared between the hosts that it waits for and the
callers that want it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Self

Caller = tuple[str, str]
"""A tenant's salt, or, where there is none, where the connection comes from."""


class Places:
    """`most` places. A host, and a caller, gets a further one only while it holds fewer than are free.

    So whoever is alone has half of them, and whoever comes next finds some: of 16 places that one host would hold for
    ever it gets 8, a second such host 4, a third one 2. Of those who wait, the caller that holds the fewest is next,
    then the host, then whoever came first.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._hosts: Counter[str] = Counter()
        self._callers: Counter[Caller] = Counter()
        self._waiting: list[_Claim] = []

    async def take(self, host: str, caller: Caller) -> Place:
        """A place, once there is one for this host and this caller. Whoever takes it gives it back."""
        claim = _Claim(host, caller)
        self._waiting.append(claim)
        self._serve()
        try:
            return await claim.place
        except asyncio.CancelledError:
            if claim in self._waiting:
                self._waiting.remove(claim)
            elif not claim.place.cancelled():
                claim.place.result().end()
            raise

    def _serve(self) -> None:
        while claim := min(filter(self._may, self._waiting), key=self._held, default=None):
            self._waiting.remove(claim)
            if not claim.place.done():  # or its caller has just left
                self._free -= 1
                self._hosts[claim.host] += 1
                self._callers[claim.caller] += 1
                claim.place.set_result(Place(self, claim))

    def _may(self, claim: _Claim) -> bool:
        return max(self._held(claim)) < self._free

    def _held(self, claim: _Claim) -> tuple[int, int]:
        return self._callers[claim.caller], self._hosts[claim.host]

    def give_back(self, claim: _Claim) -> None:
        """The place of a claim is free again; `Place.end` says so, once."""
        self._free += 1
        self._hosts -= Counter((claim.host,))  # which forgets those that hold none
        self._callers -= Counter((claim.caller,))
        self._serve()


class _Claim:
    def __init__(self, host: str, caller: Caller) -> None:
        self.host = host
        self.caller = caller
        self.place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()


class Place:
    """One of the places, until `end` or the end of a `with` block, whichever comes first."""

    def __init__(self, places: Places, claim: _Claim) -> None:
        self._places: Places | None = places
        self._claim = claim

    def end(self) -> None:
        """Gives it back, once."""
        places, self._places = self._places, None
        if places is not None:
            places.give_back(self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
