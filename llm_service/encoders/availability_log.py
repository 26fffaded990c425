"""Logs which encoders come and go, and why one, or all, cannot be used, for operators who forgot an option or an
encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from common.telemetry import log

PATIENCE_SECONDS = 15.0
"""Time for an encoder that is started at the same time, or restarted, to become available."""
AGAIN_SECONDS = 300.0
"""From one warning to the next, while nothing changes."""

_log = log.get("encoders")


class Watched(Protocol):
    """An observed encoder: `trouble` is why it cannot be used, if known; one that is `starting` has said so, and will
    log its own outcome."""

    address: str
    trouble: str
    starting: bool

    @property
    def usable(self) -> bool:
        """Whether items can be sent there."""

    @property
    def unsure(self) -> bool:
        """Nothing shows yet that it is gone."""


@dataclass(slots=True)
class _Told:
    """What was logged about one encoder last: that it is `usable`, that it is not, or nothing; and from when on its
    absence may be logged."""

    due: float
    usable: bool | None = None


class AvailabilityLog:
    """Tracks which encoders can be used, and whether any can; `clock` returns seconds."""

    def __init__(
        self,
        *,
        patience: float = PATIENCE_SECONDS,
        again: float = AGAIN_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._patience = patience
        self._again = again
        self._clock = clock
        self._since: float | None = None
        self._due = 0.0
        self._told: dict[str, _Told] = {}

    def look(self, encoders: Iterable[Watched]) -> None:
        """Logs which of these have come or gone; warns if none can be used, and none could for a while."""
        known, now = list(encoders), self._clock()
        self._told = {each.address: self._told.get(each.address, _Told(now + self._patience)) for each in known}
        self._tell_of_each(known, now)
        if any(encoder.usable or encoder.starting for encoder in known):
            self._since = None
            return
        if self._since is None:
            self._since, self._due = now, now + self._patience
        if now < self._due:
            return
        self._due = now + self._again
        for told in self._told.values():  # each that comes back is news
            told.usable, told.due = False, self._due
        _log.warning(
            "no encoder can be used: requests with pictures or videos fail",
            for_seconds=round(now - self._since),
            encoders={encoder.address: encoder.trouble or "no answer yet" for encoder in known},
            **({} if known else {"hint": "no address was found for --encoders: check the DNS name or the file"}),
        )

    def _tell_of_each(self, known: Sequence[Watched], now: float) -> None:
        beside = any(encoder.usable for encoder in known)
        for encoder in known:
            told = self._told[encoder.address]
            if encoder.usable:
                if told.usable is None:
                    told.due = now  # it has started
                if not told.usable:
                    told.usable = True
                    _log.info("an encoder can be used", address=encoder.address)
            elif beside and told.usable is not False and now >= told.due and not (encoder.unsure or encoder.starting):
                told.usable, told.due = False, now + self._again
                _log.warning(
                    "an encoder cannot be used", address=encoder.address, cause=encoder.trouble or "no answer yet"
                )
