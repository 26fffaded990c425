"""Says in the log that no encoder can be used, and why, to whoever started the services with an option missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Protocol

import grpc

from common import log
from common.grpc_channel import ChannelSecurity
from twinlens.obstacles import Obstacle, obstacle_in

PATIENCE_SECONDS = 15.0
"""For an encoder that is started at the same time, or restarted, to be there."""
AGAIN_SECONDS = 300.0
"""From one warning to the next, while nothing changes."""

_log = log.get("encoders")


class Watched(Protocol):
    """What is looked at of an encoder: `trouble` is why it cannot be used, as far as that is known; one that is
    `starting` says so itself, and will end that one way or the other."""

    address: str
    trouble: str
    starting: bool

    @property
    def usable(self) -> bool:
        """Whether items can be sent there."""


class Absence:
    """Follows whether any encoder can be used; `clock` gives seconds."""

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

    def look(self, encoders: Iterable[Watched]) -> None:
        """Warns where none of these can be used, and none could for a while."""
        known, now = list(encoders), self._clock()
        if any(encoder.usable or encoder.starting for encoder in known):
            self._since = None
            return
        if self._since is None:
            self._since, self._due = now, now + self._patience
        if now < self._due:
            return
        self._due = now + self._again
        _log.warning(
            "no encoder can be used: requests with pictures or videos fail",
            for_seconds=round(now - self._since),
            encoders={encoder.address: encoder.trouble or "no answer yet" for encoder in known},
            **({} if known else {"hint": "--encoders names nobody who is found: is the name, or the file, right?"}),
        )


def trouble(code: grpc.StatusCode, details: str, security: ChannelSecurity) -> str:
    """Why a question to an encoder failed, and which option of this service may mend it. It is for our own log."""
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return "it wants a token, or another one: --encoder-token-file"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "it is no encoder: encoders listen on port 7001, LLM services on 7002, unless told otherwise"
    if code is not grpc.StatusCode.UNAVAILABLE or (obstacle := obstacle_in(details)) is None:
        return f"{code.name}: {details}"
    remedy = _option(obstacle, security)
    return f"{obstacle.value}: {remedy}" if remedy else obstacle.value


def _option(obstacle: Obstacle, security: ChannelSecurity) -> str:
    match obstacle:
        case Obstacle.CLOSED if not security.ca:
            return "--encoder-ca turns TLS on"
        case Obstacle.CLOSED if not security.cert:
            return "--encoder-cert and --encoder-key show a certificate"
        case Obstacle.CLOSED:
            return "it may not trust the certificate of --encoder-cert"
        case Obstacle.NO_TLS:
            return "without --encoder-ca no TLS is used"
        case Obstacle.UNTRUSTED:
            return "--encoder-ca says which roots to trust"
        case Obstacle.OTHER_NAME:
            return "it must name the host that --encoders names"
        case Obstacle.NOBODY_LISTENS | Obstacle.UNKNOWN_HOST | Obstacle.NO_GRPC | Obstacle.SILENT:
            return ""
