"""The replicas of a service: resolved repeatedly, opened, renewed, and closed after their last call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from common.aio import tasks
from common.rpc.resolver import Resolver
from common.rpc.tls_files import TlsFiles
from common.telemetry import log

_log = log.get("replicas")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Upkeep(Generic[T]):
    """What to do with one replica.

    `open` creates it, given an address and the host name that it was resolved from. `renew` has its next calls use the
    current certificates; `close` drops it. These two return what remains to be done, with as many seconds of `grace`
    for calls in progress; None: none. `open` and `renew` raise OSError if the files cannot be read now.
    """

    open: Callable[[str, str], T]
    renew: Callable[[T, float], Coroutine[Any, Any, None]]
    close: Callable[[T, float | None], Coroutine[Any, Any, None]]


class ReplicaSet(Generic[T]):
    """Replicas of a `kind`, by address, as `sources` listed them at the last `look`. Calls in progress at a replica
    that has left, or with replaced certificates, have `grace` seconds to end."""

    def __init__(
        self, kind: str, sources: Resolver, files: TlsFiles | None, upkeep: Upkeep[T], *, grace: float
    ) -> None:
        self.known: dict[str, T] = {}
        self._kind = kind
        self._sources = sources
        self._files = files
        self._upkeep = upkeep
        self._grace = grace
        self._leaving: set[asyncio.Task[None]] = set()

    async def look(self) -> None:
        """Resolves all sources, adds new replicas, and drops those that are not listed any more."""
        if self._files is not None and self._files.changed():
            for address, replica in self.known.items():
                self._renew(address, replica)
        wanted = await self._sources.resolve()
        for address in wanted.keys() - self.known.keys():
            try:
                self.known[address] = self._upkeep.open(address, wanted[address])
            except OSError as error:  # the next look tries again
                _log.error("a replica cannot be reached", kind=self._kind, address=address, cause=str(error))
        for address in self.known.keys() - wanted.keys():
            self.forget(address)

    def forget(self, address: str) -> None:
        """Drops a known replica."""
        self._leave(self._upkeep.close(self.known.pop(address), self._grace), f"close {address}")

    async def close(self) -> None:
        """Closes all replicas at once, whatever is in progress."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        while self.known:
            _, replica = self.known.popitem()
            await self._upkeep.close(replica, None)

    def _renew(self, address: str, replica: T) -> None:
        try:
            self._leave(self._upkeep.renew(replica, self._grace), f"renew {address}")
        except OSError as error:  # replaced once more, and not whole yet
            why = str(error)
            _log.error("a replica's new certificates cannot be used", kind=self._kind, address=address, cause=why)

    def _leave(self, closing: Coroutine[Any, Any, None], name: str) -> None:
        task = tasks.start(closing, name)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
