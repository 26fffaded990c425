"""Chooses the encoder of one item, attempt by attempt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

from common.errors import Exhausted, Internal
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.replica import Replica
from llm_service.encoders.wait_queue import Waiter
from llm_service.request import Request

_APART_SECONDS = 10.0
"""How long an item over which an encoder has died only goes where there is no other such item."""
_LEAST_HINT = 0.1
"""Fewest seconds for which a full encoder is not asked, whatever it says, since each attempt sends the item again."""


def _nothing() -> None:
    """The default `on_wait`."""


class EncoderChoice:
    """The encoders that an item has `tried` (addresses, in order), those it will `exclude`, and the next one.

    `affinity` is equal for repeats of the item, `field` is its place in the request. It waits for room until
    `patient_until`, in monotonic seconds, and calls `on_wait` when it has to wait. Its creator closes it.
    """

    def __init__(self, pool: EncoderPool, affinity: bytes, request: Request, field: str, patient_until: float) -> None:
        self.tried: list[str] = []
        self.patient_until = patient_until
        self.on_wait: Callable[[], None] = _nothing
        self._pool = pool
        self._affinity = affinity
        self._request = request
        self._field = field
        self._excluded: set[str] = set()
        self._refusal: Exhausted | None = None
        self._refused_by: set[str] = set()
        self._waiter = Waiter(pool.wait_queue, request.priority)
        self._apart = ExitStack()
        self._apart_until: float | None = None

    async def next(self) -> Replica:
        """The encoder to ask, usually at once; it counts as tried.

        An item over which an encoder has died goes where no other request has such an item, unless that takes too long:
        otherwise it would be unknown which of them killed the next one. Raises Internal if two have died over the item,
        Exhausted if all are full for too long, Unavailable if there is none.
        """
        pool, isolation, request = self._pool, self._pool.isolation, self._request
        while True:
            if await pool.refuses(self._affinity):
                raise Internal("encoders crashed on this item", reason="POISON_ITEM", field=self._field)
            if (suspect := pool.is_suspect(self._affinity)) and self._apart_until is None:
                self._apart_until = monotonic() + _APART_SECONDS
            apart_until = self._apart_until or 0.0
            apart = suspect and monotonic() < apart_until
            if apart and self._usable() and not self._free():
                self._waiter.leave()
                await isolation.one_left(min(apart_until, monotonic() + pool.settings.check_seconds))  # or one came
                continue
            await self._room()
            avoided = self._excluded | isolation.taken(request) if apart and self._free() else self._excluded
            replica = await pool.pick(self._affinity, self.tried, avoided)
            if apart and replica.address in isolation.taken(request):  # meanwhile
                continue
            if suspect:
                self._apart.enter_context(isolation.at(replica.address, request))
            self.tried.append(replica.address)
            return replica

    def another(self, able: Callable[[Replica], bool]) -> Replica | None:
        """An encoder that was not tried yet and is `able` to do better; None if there is none. Does not wait."""
        return self._pool.another(self._affinity, self._excluded.union(self.tried), able)

    @property
    def is_waiting(self) -> bool:
        """The item waits for room."""
        return self._waiter.is_waiting

    def on_sending(self) -> None:
        """The item is being sent to the encoder."""
        self._waiter.on_sending()

    def on_accepted(self) -> None:
        """The encoder has accepted the item: the next waiter may go."""
        self._apart_until = None
        self._waiter.leave()

    def on_going_on(self, replica: Replica) -> None:
        """Of two encoders that had the item, this one is left. If the other has died, the item may be deadly, and other
        such items are to stay away."""
        if self._pool.is_suspect(self._affinity):
            self._apart.enter_context(self._pool.isolation.at(replica.address, self._request))

    def on_done(self) -> None:
        """The encoder no longer has to do with the item."""
        self._apart.close()

    def exclude(self, replica: Replica) -> None:
        """The encoder does not have this key, and is not asked again."""
        self._excluded.add(replica.address)

    def on_full(self, replica: Replica, error: Exhausted) -> None:
        """The encoder is full. Raises the error if it is permanent: the item never fits."""
        if error.retry_after is None:
            raise error
        replica.refused(max(error.retry_after, _LEAST_HINT))
        self._refusal = error
        self._refused_by.add(replica.address)

    def candidates(self) -> list[Replica]:
        """The encoders that have not reported the key as missing."""
        return [replica for replica in self._pool.replicas if replica.address not in self._excluded]

    def close(self) -> None:
        """Ends it, and the waiting for room. It waits for nothing, so that no cancellation can come between."""
        self.on_done()
        self._waiter.leave()

    async def _room(self) -> None:
        """Waits until an encoder may have room for the item, usually not at all. With many, one always may: the first
        one's pause is over by the time the last has refused."""
        if self._refusal is not None and monotonic() >= self.patient_until and self._have_all_refused():
            raise self._refusal
        try:
            await self._waiter.wait(self._usable, self.patient_until, self.on_wait)
        except TimeoutError:
            full = Exhausted("every encoder is full", reason="QUEUE_FULL", field=self._field)
            raise self._refusal or full from None

    def _have_all_refused(self) -> bool:
        usable = self._usable()
        return bool(usable) and all(replica.address in self._refused_by for replica in usable)

    def _usable(self) -> list[Replica]:
        return [replica for replica in self.candidates() if replica.usable]

    def _free(self) -> list[Replica]:
        """The usable encoders without suspects of other requests; without full ones if another has room, since then
        nobody waits for room."""
        taken, usable = self._pool.isolation.taken(self._request), self._usable()
        roomy = [replica for replica in usable if not replica.full] or usable
        return [replica for replica in roomy if replica.address not in taken]
