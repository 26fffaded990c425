"""Processes that would each compute on all cores of a host share them, since threads that wait for each other lose most
of their time if another process occupies their cores."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from common.hardware import usable_cores

_CLAIMS = 8
"""Processes that are counted; any further one computes as if alone."""
_LOOK_SECONDS = 0.005
"""Seconds between checks of who else computes; a check takes 10 µs."""


class CoreShare:
    """One process's share of `threads` cores, for one thread of it; `use` is called when the share changes.

    A computing process holds a *claim*: a name in the abstract name space of Unix sockets, which the kernel releases
    when the process ends. The share is the number of cores divided by the number of claims, at least one.
    """

    def __init__(self, name: str, threads: int, use: Callable[[int], None]) -> None:
        self._claims = [f"\0{name}-{claim}" for claim in range(_CLAIMS)]
        self._threads = self._used = threads
        self._use = use
        self._claim: socket.socket | None = None
        self._others: list[str] = []
        self._looked = 0.0
        self._probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    @classmethod
    def of_this_host(cls, threads: int, use: Callable[[int], None]) -> CoreShare | None:
        """The share among processes of the same user that compute on the same cores; None for a process that leaves
        cores to others, or has only one: `threads` are all that it computes with."""
        if threads < max(2, usable_cores()):
            return None
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        return cls(f"twinlens-cores-{os.getuid()}-{cores:x}", threads, use)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which this process computes."""
        self._claim, self._others = self._take()
        self._looked = 0.0
        try:
            self.look()
            yield
        finally:
            if self._claim is not None:
                self._claim.close()
                self._claim = None

    def look(self) -> None:
        """Updates the share; does nothing outside of `computing`, or right after the last update."""
        if self._claim is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        share = max(1, self._threads // (1 + sum(map(self._is_held, self._others))))
        self._looked = time.monotonic()
        if share != self._used:
            self._used = share
            self._use(share)

    def between(self, modules: Iterable[Any]) -> None:
        """Has `look` called before each of some `torch.nn.Module`s."""
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self.look())

    def close(self) -> None:
        """Gives its descriptor back; not used any more after that."""
        self._probe.close()

    def _take(self) -> tuple[socket.socket | None, list[str]]:
        """Takes the first free claim, None if all are held; also returns the others' claims."""
        for claim in self._claims:
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                holder.bind(claim)
            except OSError:
                holder.close()
            else:
                return holder, [other for other in self._claims if other != claim]
        return None, []

    def _is_held(self, claim: str) -> bool:
        try:
            self._probe.connect(claim)
        except OSError:
            return False
        return True
