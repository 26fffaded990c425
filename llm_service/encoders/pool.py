"""The encoders that can be asked: found by address, name or list, which are read again while running.

An item goes to the encoder that rendezvous hashing picks for its content, so that repeats meet their cache and a change
in the list moves few items; an encoder that is crowded is passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from common import log, tasks
from common.errors import Unavailable
from common.rendezvous import ranked
from common.resolver import Resolver
from llm_service.encoders.absence import Absence
from llm_service.encoders.breaker import DEATHS, Quarantine
from llm_service.encoders.health import EncoderHealth
from llm_service.encoders.isolation import Isolation
from llm_service.encoders.replica import LinkSettings, Replica
from llm_service.encoders.wait_queue import WaitQueue

_log = log.get("encoders")
_CROWDED_CALLS = 8
"""Calls under way at which the next choice is taken instead, where that one has fewer."""
_CROWDED_PATCHES = 65_536
"""Patches that wait or are computed at an encoder, for anyone, at which the next choice is taken, likewise."""


class EncoderPool:
    """All encoders of one service, at `addresses` as `Resolver` takes them; streams at an encoder whose address has
    gone may go on to their end."""

    def __init__(self, addresses: Sequence[str], settings: LinkSettings) -> None:
        self.settings = settings
        self.quarantine = Quarantine()
        self.isolation = Isolation()
        self.wait_queue = WaitQueue()
        self._retiring: set[asyncio.Task[None]] = set()
        self._sources = Resolver(addresses)
        self._configured = bool(addresses)
        self._absence = Absence()
        self._files = settings.security.files()
        self._replicas: dict[str, tuple[Replica, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._resolver: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[Replica]:
        """The encoders known now."""
        return [replica for replica, _ in self._replicas.values()]

    async def start(self) -> None:
        """Begins to look encoders up and to watch them; does not wait for any."""
        if not self._configured:
            _log.warning(
                "no encoder is configured: requests with pictures or videos fail", hint="--encoders names them"
            )
            return
        self._resolver = tasks.start(self._keep_resolving(), "encoder resolver")

    async def stop(self) -> None:
        """Ends all watching and closes all channels."""
        if self._resolver is not None:
            self._resolver.cancel()
            await asyncio.gather(self._resolver, return_exceptions=True)
        for address in list(self._replicas):
            await self._remove(address, grace=None)
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def _keep_resolving(self) -> None:
        while True:
            if self._files is not None and self._files.changed():
                for each in self.replicas:
                    self._retire(each.reconnect(self.settings.timeout), f"reconnect {each.address}")
            wanted = await self._sources.resolve()
            for address in wanted.keys() - self._replicas.keys():
                self._add(address, wanted[address])
            for address in self._replicas.keys() - wanted.keys():
                await self._remove(address, grace=self.settings.timeout)
            self._absence.look(self.replicas)
            await asyncio.sleep(self.settings.resolve_seconds)

    def _add(self, address: str, name: str) -> None:
        """Begins to watch an encoder; where certificates cannot be read just now, the next time of looking up does."""
        try:
            replica = Replica(address, name, self.settings, self.quarantine, self.wait_queue.opened)
        except OSError as error:
            _log.error("an encoder cannot be spoken to", address=address, cause=str(error))
            return
        self._replicas[address] = (replica, tasks.start(replica.watch(self._changed), f"watch {address}"))

    async def _remove(self, address: str, *, grace: float | None) -> None:
        """Forgets an encoder; what is under way there has `grace` seconds to end, behind the caller's back."""
        replica, watcher = self._replicas.pop(address)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        task = self._retire(replica.close(grace), f"close {address}")
        if grace is None:
            await task

    def _retire(self, closing: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = tasks.start(closing, name)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def refuses(self, identity: bytes) -> bool:
        """Whether two encoders have died over this item; where that is still in question it is waited for, so that no
        third one does."""
        suspects = self._suspected_with(identity)
        if len(suspects) + self.quarantine.deaths(identity) >= DEATHS:
            await asyncio.gather(*(health.judged() for health in suspects))
        return self.quarantine.is_quarantined(identity)

    def is_suspect(self, identity: bytes) -> bool:
        """Whether an encoder has died over this item, or may have, perhaps by chance."""
        return bool(self.quarantine.deaths(identity) or self._suspected_with(identity))

    def _suspected_with(self, identity: bytes) -> list[EncoderHealth]:
        return [replica.health for replica in self.replicas if replica.health.is_suspected_with(identity)]

    async def pick(self, identity: bytes, tried: Collection[str] = (), lacking: Collection[str] = ()) -> Replica:
        """The encoder for an item, by what makes repeats of it alike; one that was not tried yet, where there is one,
        and none that is known to be `lacking` it.

        Where none can be used for most of a second, one is taken of which that is not certain. Raises Unavailable where
        there is none of those either.
        """

        def able(is_able: Callable[[Replica], bool]) -> list[Replica]:
            return [replica for replica in self.replicas if is_able(replica) and replica.address not in lacking]

        try:
            async with asyncio.timeout(self.settings.pick_seconds):
                while not (usable := able(lambda replica: replica.usable)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            usable = able(lambda replica: replica.usable or replica.unsure)
            if not usable:
                raise Unavailable("no encoder is available", reason="NO_ENCODER") from None
        fresh = [replica for replica in usable if replica.address not in tried]
        return _choose(identity, fresh or usable)


def _choose(identity: bytes, replicas: Sequence[Replica]) -> Replica:
    """By rank, but past those that are full or crowded while others are not."""
    in_order = ranked(identity, replicas, lambda replica: replica.address)
    roomy = [replica for replica in in_order if not replica.full] or in_order
    calls, patches = min(replica.in_flight for replica in roomy), min(replica.load for replica in roomy)
    for replica in roomy:
        crowded = replica.in_flight >= _CROWDED_CALLS and replica.in_flight > calls
        if not crowded and not (replica.load >= _CROWDED_PATCHES and replica.load > patches):
            return replica
    return min(roomy, key=lambda replica: (replica.in_flight, replica.load))
