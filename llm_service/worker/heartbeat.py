"""How a rank of a group knows that the others live: beats in the store that they met at.

A collective that waits for a lost rank cannot tell; within a captured graph it would wait for ever. So a thread of each
rank counts a beat up every half second: rank 0 watches everybody's, everybody watches rank 0's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported for checkers

from common.process.status import HELD_UP_SECONDS, how_it_ended, is_held_up
from common.telemetry import log
from llm_service.settings import RankPlace

_BEAT_SECONDS = 0.5
_log = log.get("heartbeat")


class Process(Protocol):
    """A child process of this one."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        ...


class PlaceTakenError(Exception):
    """The group at this address has, or had, this rank: it is the previous group, which has not ended yet."""


class Heartbeat:
    """A connection of its own to the store, so that a beat never waits behind another question. If a beat stands still
    for the group's time limit, or the store does not answer, this process ends, and with it its part of the group. A
    rank joins with its first beat, and is watched from then on."""

    def __init__(self, place: RankPlace, children: Sequence[Process] = ()) -> None:
        """Joins. `children` are the ranks that this process has started, from the next one on; they are also watched as
        processes: one that ends by a signal or an error is lost at once. Raises PlaceTakenError if a rank of this
        number has joined already, since the others of a group that has lost it would never answer."""
        self._limit = place.timeout
        self._children = children
        self._here = {_key(place.rank + n): child.pid for n, child in enumerate(children, 1)}
        if place.rank and place.is_on_first_host:
            self._here[_key(0)] = os.getppid()
        self._own = _key(place.rank)
        self._others = [_key(rank) for rank in range(1, place.size)] if place.rank == 0 else [_key(0)]
        # Rank 0 keeps the store. On its own host it may be held up; if it hangs, the front ends it, and us with it.
        patience = max(place.timeout, HELD_UP_SECONDS) if place.is_on_first_host else place.timeout
        self._store = TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=patience))
        first = str(-1 - int.from_bytes(os.urandom(8), "big"))  # below all later beats, and unique
        if self._store.compare_set(self._own, "", first) != first.encode():
            raise PlaceTakenError(f"rank {place.rank} is taken")

    def start(self, die: Callable[[], None] = lambda: os._exit(1)) -> None:
        """Begins to beat and to watch, in a thread. `die` ends the process."""
        threading.Thread(target=self._run, args=(die,), name="heartbeat", daemon=True).start()

    def _run(self, die: Callable[[], None]) -> None:
        try:
            self._watch()
        except RuntimeError as error:  # the store raises RuntimeError
            _log.error("the group has ended", cause=str(error).partition("\n")[0])
        die()

    def _watch(self) -> None:
        """Returns when another rank is lost, found so twice in a row: one that was slow may have beaten, and gone to
        sleep, between the first look at its beat and that at its process."""
        seen: dict[str, tuple[bytes, float]] = {}
        joined: list[str] = []
        suspects: set[str] = set()
        before = time.monotonic()
        for count in range(1, 1 << 62):
            self._store.set(self._own, str(count))
            for key, status in zip(self._here, (child.poll() for child in self._children), strict=False):
                if status:
                    _log.error("a rank of this host has ended", rank=key, status=how_it_ended(status))
                    return
            now = time.monotonic()
            if now - before > 2 * _BEAT_SECONDS:  # this process was held up itself, so it judges no one by the time
                seen.clear()
                suspects.clear()
            before = now
            joined += [key for key in self._others if key not in joined and self._store.check([key])]
            beats = self._store.multi_get(joined) if joined else []
            for key, beat in zip(joined, beats, strict=True):
                if key not in seen or seen[key][0] != beat:
                    seen[key] = (beat, now)
                    suspects.discard(key)
                elif not self._is_lost(key, now - seen[key][1]):
                    suspects.discard(key)
                elif key in suspects:
                    _log.error("a rank is frozen or cut off", rank=key)
                    return
                else:
                    suspects.add(key)
            time.sleep(_BEAT_SECONDS)

    def _is_lost(self, key: str, silence: float) -> bool:
        if silence <= self._limit:
            return False
        # One of the same host that the system says is merely held up gets more time.
        slow = key in self._here and silence <= HELD_UP_SECONDS and is_held_up(self._here[key])
        return not slow


def _key(rank: int) -> str:
    return f"beat/{rank}"
