"""Errors as gRPC statuses, and back: our own `Status` message, and the details of `google.rpc`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from common import errors
from twinlens.v1 import media_pb2

DOMAIN = "twinlens"
"""The domain of our `ErrorInfo` reasons."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def fail(context: Context, error: errors.TwinlensError, *, sent_within: float = 1.0) -> NoReturn:
    """Ends a call with an error's status, its standard details, and the short form for clients without them.

    The status follows everything sent before. If the client does not read that, the status is sent nevertheless, and
    waited for no longer than `sent_within`.
    """
    trailers = (
        ("grpc-status-details-bin", rich_status(error).SerializeToString()),
        ("twinlens-status-bin", plain_status(error).SerializeToString()),
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(sent_within):
            await context.abort(errors.outcome(error).grpc, error.message, trailers)
    raise asyncio.CancelledError  # as gRPC takes the end of a call that has its status


def plain_status(error: errors.TwinlensError) -> media_pb2.Status:
    """An error as our own message, as it also stands in `EncodeError`."""
    status = media_pb2.Status(
        code=errors.code_number(error), message=error.message, reason=error.reason, field=error.field
    )
    if error.retry_after is not None:
        status.retry_after_ms = round(error.retry_after * 1000)
    return status


def from_plain_status(status: media_pb2.Status) -> errors.TwinlensError:
    """The error that a `Status` message stands for."""
    retry_after = status.retry_after_ms / 1000 if status.HasField("retry_after_ms") else None
    return errors.from_code(
        status.code, status.message, reason=status.reason, field=status.field, retry_after=retry_after
    )


def rich_status(error: errors.TwinlensError) -> status_pb2.Status:
    """An error in gRPC's standard error model: ErrorInfo, BadRequest for a field, RetryInfo if a retry can help."""
    status = status_pb2.Status(code=errors.code_number(error), message=error.message)
    _attach(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after * 1000))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _attach(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
