"""The token that callers must send, and the treatment of callers without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from common.errors import Unauthenticated
from common.rpc.bearer_tokens import AcceptedTokens
from common.rpc.status import Context, fail
from common.telemetry import log
from common.telemetry.rate_limit import STRANGERS_SECONDS, RateLimit

_log = log.get("rpc")


class BearerToken:
    """The expected value of `authorization`."""

    def __init__(self, accepted: AcceptedTokens) -> None:
        self._accepted = accepted
        self._lines = RateLimit(STRANGERS_SECONDS)

    def admits(self, details: grpc.HandlerCallDetails) -> bool:
        """Whether a call has an accepted token, or none is required."""
        given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        if isinstance(given, str):
            given = given.encode()
        kind, _, token = given.partition(b" ")
        return self._accepted.admit(token if kind == b"Bearer" else b"")

    async def refuse(self, context: Context, on_error: Callable[[str], Any]) -> NoReturn:
        """Ends a stranger's call."""
        error = Unauthenticated("a valid bearer token is needed")
        on_error(error.reason)
        if (before := self._lines.take()) is not None:
            _log.warning("a call is refused: no valid token", reason=error.reason, peer=context.peer(), others=before)
        await fail(context, error)
