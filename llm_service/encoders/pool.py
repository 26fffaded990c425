"""The encoders, found by address, name or list, which are resolved repeatedly.

An item goes to the encoder that rendezvous hashing picks for its content, so that repeats meet their cache and a change
in the list moves few items; crowded and slow encoders are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from common.aio import tasks
from common.errors import Unavailable
from common.rpc.rendezvous_hash import ranked
from common.rpc.replica_set import ReplicaSet, Upkeep
from common.rpc.resolver import Resolver
from common.telemetry import log
from llm_service.encoders.availability_log import AvailabilityLog
from llm_service.encoders.breaker import DEATHS, Quarantine
from llm_service.encoders.health import EncoderHealth
from llm_service.encoders.isolation import Isolation
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncoderSettings
from llm_service.encoders.wait_queue import WaitQueue

_log = log.get("encoders")
_CROWDED_CALLS = 8
"""Calls in progress at which the next choice is taken if it has fewer."""
_CROWDED_PATCHES = 65_536
"""Patches that wait or are computed at an encoder, for anyone, at which the next choice is taken if it has fewer."""


@dataclass(frozen=True, slots=True)
class WatchedReplica:
    """An encoder, and the task that checks it."""

    replica: Replica
    watcher: asyncio.Task[None]


async def _close(watched: WatchedReplica, grace: float | None) -> None:
    watched.watcher.cancel()
    await asyncio.gather(watched.watcher, return_exceptions=True)
    await watched.replica.close(grace)


def _renew(watched: WatchedReplica, grace: float) -> Coroutine[Any, Any, None]:
    return watched.replica.reconnect().close(grace)


class EncoderPool:
    """All encoders of one service, at `addresses` in the form of `Resolver`; streams at an encoder whose address has
    gone may finish."""

    def __init__(self, addresses: Sequence[str], settings: EncoderSettings) -> None:
        self.settings = settings
        self.quarantine = Quarantine()
        self.isolation = Isolation()
        self.wait_queue = WaitQueue()
        self._configured = bool(addresses)
        self._availability = AvailabilityLog()
        self.replica_set = ReplicaSet(
            "encoder",
            Resolver(addresses),
            settings.security.files(),
            Upkeep(self._open, _renew, _close),
            grace=settings.timeout,
        )
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[Replica]:
        """The encoders known now."""
        return [watched.replica for watched in self.replica_set.known.values()]

    async def start(self) -> None:
        """Begins to look encoders up and to watch them; does not wait for any."""
        if not self._configured:
            _log.warning(
                "no encoder is configured: requests with pictures or videos fail", hint="--encoders names them"
            )
            return
        self._looking = tasks.start(self._keep_looking(), "encoder resolver")

    async def stop(self) -> None:
        """Ends all watching and closes all channels."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self.replica_set.close()

    async def _keep_looking(self) -> None:
        while True:
            await self.replica_set.look()
            self._availability.look(self.replicas)
            await asyncio.sleep(self.settings.resolve_seconds)

    def _open(self, address: str, name: str) -> WatchedReplica:
        replica = Replica(address, name, self.settings, self.quarantine, self.wait_queue.opened)
        return WatchedReplica(replica, tasks.start(replica.watch(self._changed), f"watch {address}"))

    async def refuses(self, affinity: bytes) -> bool:
        """Whether two encoders crashed over this item; if that is still being found out, waits for it, so that no third
        one does."""
        suspects = self._suspected_with(affinity)
        if len(suspects) + self.quarantine.deaths(affinity) >= DEATHS:
            await asyncio.gather(*(health.judged() for health in suspects))
        return self.quarantine.is_quarantined(affinity)

    def is_suspect(self, affinity: bytes) -> bool:
        """Whether an encoder has died over this item, or may have, perhaps by chance."""
        return bool(self.quarantine.deaths(affinity) or self._suspected_with(affinity))

    def _suspected_with(self, affinity: bytes) -> list[EncoderHealth]:
        return [replica.health for replica in self.replicas if replica.health.is_suspected_with(affinity)]

    async def pick(self, affinity: bytes, tried: Collection[str] = (), lacking: Collection[str] = ()) -> Replica:
        """The encoder for an item, by what its repeats have in common; one that was not tried yet, if there is one, and
        none that is known to be `lacking` it.

        If none can be used for most of a second, an uncertain one is taken. Raises Unavailable if there is none of
        these either.
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
        chosen = _choose(affinity, fresh or usable)
        chosen.pace.on_sending()
        return chosen

    def learn(self, replica: Replica, seconds: float, patches: int) -> None:
        """All rows of an item of so many patches, which had to be computed, have come; one took so many seconds."""
        others = [each for each in self.replicas if each is not replica and each.usable and not each.pace.slow]
        elsewhere = min((each.expected(patches) for each in others), default=float("inf"))
        if replica.pace.on_computed(seconds, patches, elsewhere):
            _log.info("an encoder is no longer slow", address=replica.address)

    def another(self, affinity: bytes, avoided: Collection[str], able: Callable[[Replica], bool]) -> Replica | None:
        """An encoder for an item that is overdue at its own, at none of the `avoided` addresses, that is `able` to do
        better; None if there is none, or if items wait for room."""
        if len(self.wait_queue):
            return None
        others = [replica for replica in self.replicas if replica.usable and replica.address not in avoided]
        better = [replica for replica in others if not (replica.full or replica.pace.slow) and able(replica)]
        return _choose(affinity, better) if better else None


def _choose(affinity: bytes, replicas: Sequence[Replica]) -> Replica:
    """The first by rank, skipping those that are full, slow or crowded while others are not."""
    in_order = ranked(affinity, replicas, lambda replica: replica.address)
    roomy = [replica for replica in in_order if not replica.full] or in_order
    roomy = [replica for replica in roomy if not replica.passed_over] or roomy
    calls, patches = min(replica.in_flight for replica in roomy), min(replica.load for replica in roomy)
    for replica in roomy:
        crowded = replica.in_flight >= _CROWDED_CALLS and replica.in_flight > calls
        if not crowded and not (replica.load >= _CROWDED_PATCHES and replica.load > patches):
            return replica
    return min(roomy, key=lambda replica: (replica.in_flight, replica.load))
