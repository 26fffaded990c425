"""What a client sees when a call fails.

    TwinlensError                 the service refused or failed the call, with a stable reason
    ├── NotReachableError         nothing that speaks for Twinlens answered at the address
    └── InterruptedStreamError    a stream broke off after events had come, and nobody said why

A service sends its reason in the trailer `twinlens-status-bin`, a serialized `twinlens.v1.Status`. A call
that has no such trailer failed on the way: its gRPC status is all that is known.
"""

from __future__ import annotations

import copyreg
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from twinlens.obstacles import Obstacle, obstacle_in
from twinlens.v1 import Status

STATUS_TRAILER = "twinlens-status-bin"

_NUMBERS: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}
)
"""gRPC's statuses of a stream that the other side, or a proxy, has closed."""
_OVERLOAD = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


class FailedCall(Protocol):
    """What `grpc.RpcError` and `grpc.aio.AioRpcError` have in common, without a shared type."""

    def code(self) -> grpc.StatusCode | None:
        """The gRPC status code."""

    def details(self) -> str | None:
        """The text of the status."""


class TwinlensError(Exception):
    """A call that did not succeed.

    `code` is the gRPC status code, `reason` a stable upper-case word such as IMAGE_TOO_LARGE ("" if the service gave
    none), `field` the path of the request field at fault ("" if no single one), `retry_after` seconds after which a
    retry can help (None: the service did not suggest one).
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes errors picklable: they would be recreated from their text alone."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    @property
    def retryable(self) -> bool:
        """Whether the same request can succeed later."""
        return self.retry_after is not None or self.code in _OVERLOAD

    def __str__(self) -> str:
        where = f" (field {self.field})" if self.field else ""
        return f"{self.reason or self.code.name}: {self.message}{where}"


class NotReachableError(TwinlensError):
    """No service answered: wrong address, not started, gone, or a failed TLS handshake.

    `obstacle` says which, if gRPC's `message` tells it.
    """

    @property
    def obstacle(self) -> Obstacle | None:
        """What is in the way; None if unknown."""
        return obstacle_in(self.message)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.obstacle.value} ({self.message})" if self.obstacle else super().__str__()


class InterruptedStreamError(TwinlensError):
    """A stream broke off on its way: the service is gone, or the connection to it.

    `events` is how many events had come, so output was delivered; the same request again gives it from its beginning.
    The reason is always STREAM_INTERRUPTED.
    """

    def __init__(self, code: grpc.StatusCode, message: str, *, events: int) -> None:
        had_come = f"{events} event{'s' if events > 1 else ''}"
        super().__init__(code, f"the stream broke off after {had_come}: {message}", reason="STREAM_INTERRUPTED")
        self.events = events

    @property
    def retryable(self) -> bool:
        """Always: nothing was wrong with the request."""
        return True


def error_from(call: FailedCall, events: int = 0) -> TwinlensError:
    """Turns a failed gRPC call, after so many `events`, into the most specific error."""
    code = call.code() or grpc.StatusCode.UNKNOWN
    status = _status_of(call)
    if status is not None:
        return TwinlensError(
            _NUMBERS.get(status.code, code),
            status.message,
            reason=status.reason,
            field=status.field,
            retry_after=status.retry_after_ms / 1000 if status.HasField("retry_after_ms") else None,
        )
    message = call.details() or "the service gave no reason"
    if events and code in _BROKEN:
        return InterruptedStreamError(code, message, events=events)
    kind = NotReachableError if code is grpc.StatusCode.UNAVAILABLE else TwinlensError
    return kind(code, message)


def _status_of(call: FailedCall) -> Status | None:
    """The service's own status; None if the trailer is missing or not ours."""
    trailers = getattr(call, "trailing_metadata", lambda: None)() or ()
    for key, value in trailers:
        if key == STATUS_TRAILER and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return None
    return None
