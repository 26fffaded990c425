"""Every error that a caller can see, and the one table that says how it looks on each wire.

    TwinlensError
    ├── InvalidInput          the request cannot be served as it is          INVALID_ARGUMENT
    ├── Unauthenticated       no token, or a wrong one                       UNAUTHENTICATED
    ├── Forbidden             a place that this service may not reach        PERMISSION_DENIED
    ├── NotFound              no such key or model                           NOT_FOUND
    ├── Precondition          the world outside is not as the request needs  FAILED_PRECONDITION
    ├── Exhausted             a queue or cache is full; retry later          RESOURCE_EXHAUSTED
    ├── DeadlineExceeded      the caller's time is over                      DEADLINE_EXCEEDED
    ├── Unavailable           a part is down and will be back                UNAVAILABLE
    ├── DataLoss              rows were damaged on the way                   DATA_LOSS
    ├── Unsupported           in the contract, not in this release           UNIMPLEMENTED
    ├── Cancelled             the caller, or Abort, ended it                 CANCELLED
    └── Internal              our fault                                      INTERNAL

Handlers raise; one interceptor answers. A message is a fixed sentence of ours: it holds no path, address or class name.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Self, TypeVar

import grpc

Caught = TypeVar("Caught", bound=BaseException)


class TwinlensError(Exception):
    """An error with a stable `reason`, the request `field` at fault, and when a retry can help.

    `message` is safe to show; `retry_after` is in seconds, None if a retry does not help.
    """

    default_reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str = "", field: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after = retry_after

    def at(self, field: str, *, instead_of: str | None = None) -> Self:
        """A copy for one of several callers, each of whom knows the item by another `field`.

        With `instead_of`, only that beginning of this error's field is replaced, and other fields stay.
        """
        own = copy.copy(self)
        if instead_of is None:
            own.field = field
        elif instead_of and self.field.startswith(instead_of):
            own.field = field + self.field.removeprefix(instead_of)
        return own


def without_traces(error: Caught) -> Caught:
    """The error without its causes and tracebacks, for keeping: their frames may hold megabytes, and whoever keeps the
    error."""
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None:
            found += (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()))
            one.__traceback__ = one.__cause__ = one.__context__ = None
    return error


class InvalidInput(TwinlensError):
    """The request cannot be served as it is."""

    default_reason = "INVALID_INPUT"


class Unauthenticated(TwinlensError):
    """No token, or a wrong one."""

    default_reason = "UNAUTHENTICATED"


class Forbidden(TwinlensError):
    """The request names a place that this service may not reach."""

    default_reason = "FORBIDDEN"


class NotFound(TwinlensError):
    """There is no such key or model."""

    default_reason = "NOT_FOUND"


class Precondition(TwinlensError):
    """The world outside is not as the request needs it."""

    default_reason = "FAILED_PRECONDITION"


class Exhausted(TwinlensError):
    """A queue or cache is full. A retry hint is always given: one second unless said otherwise."""

    default_reason = "EXHAUSTED"

    def __init__(self, message: str, *, reason: str = "", field: str = "", retry_after: float | None = 1.0) -> None:
        super().__init__(message, reason=reason, field=field, retry_after=retry_after)


class DeadlineExceeded(TwinlensError):
    """The caller's time is over."""

    default_reason = "DEADLINE_EXCEEDED"


class Unavailable(TwinlensError):
    """A part is down and will be back. A retry hint is always given: one second unless said otherwise."""

    default_reason = "UNAVAILABLE"

    def __init__(self, message: str, *, reason: str = "", field: str = "", retry_after: float | None = 1.0) -> None:
        super().__init__(message, reason=reason, field=field, retry_after=retry_after)


class DataLoss(TwinlensError):
    """Rows were damaged on the way."""

    default_reason = "DATA_LOSS"


class Unsupported(TwinlensError):
    """In the contract, not in this release."""

    default_reason = "UNIMPLEMENTED"


class Cancelled(TwinlensError):
    """The caller, or Abort, ended the request."""

    default_reason = "CANCELLED"


class Internal(TwinlensError):
    """Our fault; the log says more than the caller is told."""

    default_reason = "INTERNAL"


ENCODER_SLOW: Final = "ENCODER_SLOW"
"""The reason of an Unavailable that is of an LLM service's own patience: an item has had all the time that one may
take."""

LEASE_EXPIRED: Final = "LEASE_EXPIRED"
"""The reason of an Unavailable whose reader was late: the holder of the rows is not to blame."""

CALLER_STALLED: Final = "CALLER_STALLED"
"""The same of rows, or other messages, that came in the call itself."""

MEDIA_HOST: Final = "MEDIA_HOST_UNAVAILABLE"
"""The reason of an Unavailable caused by a foreign media host: no encoder is to blame, and no other can do better."""

MEDIA_CHANGED: Final = "MEDIA_CHANGED"
"""The reason of an Unavailable for an address that returned different media within a request: a retry works."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one kind of error looks outside: its gRPC and HTTP status, and whether another server may be tried."""

    grpc: grpc.StatusCode
    http: HTTPStatus
    retryable: bool


OUTCOMES: Final[dict[type[TwinlensError], Outcome]] = {
    InvalidInput: Outcome(grpc.StatusCode.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST, False),
    Unauthenticated: Outcome(grpc.StatusCode.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED, False),
    Forbidden: Outcome(grpc.StatusCode.PERMISSION_DENIED, HTTPStatus.FORBIDDEN, False),
    NotFound: Outcome(grpc.StatusCode.NOT_FOUND, HTTPStatus.NOT_FOUND, False),
    Precondition: Outcome(grpc.StatusCode.FAILED_PRECONDITION, HTTPStatus.UNPROCESSABLE_ENTITY, False),
    Exhausted: Outcome(grpc.StatusCode.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS, True),
    DeadlineExceeded: Outcome(grpc.StatusCode.DEADLINE_EXCEEDED, HTTPStatus.GATEWAY_TIMEOUT, False),
    Unavailable: Outcome(grpc.StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE, True),
    DataLoss: Outcome(grpc.StatusCode.DATA_LOSS, HTTPStatus.BAD_GATEWAY, True),
    Unsupported: Outcome(grpc.StatusCode.UNIMPLEMENTED, HTTPStatus.NOT_IMPLEMENTED, False),
    Cancelled: Outcome(grpc.StatusCode.CANCELLED, HTTPStatus.REQUEST_TIMEOUT, False),
    Internal: Outcome(grpc.StatusCode.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR, False),
}

_BY_NUMBER: Final = {outcome.grpc.value[0]: kind for kind, outcome in OUTCOMES.items()}


def outcome(error: TwinlensError) -> Outcome:
    """The table's row for an error, found by its nearest listed class."""
    return next(OUTCOMES[kind] for kind in type(error).__mro__ if kind in OUTCOMES)


def code_number(error: TwinlensError) -> int:
    """The google.rpc.Code number of an error."""
    number: int = outcome(error).grpc.value[0]
    return number


def from_code(
    number: int, message: str, *, reason: str = "", field: str = "", retry_after: float | None = None
) -> TwinlensError:
    """The error that a google.rpc.Code number stands for; `Internal` for a number that is not in the table."""
    kind = _BY_NUMBER.get(number, Internal)
    return kind(message, reason=reason, field=field, retry_after=retry_after)
