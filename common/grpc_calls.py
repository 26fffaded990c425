"""What surrounds every call: the token, the deadline, the request id in the logs, and errors turned into statuses.

Handlers just raise; here, and nowhere else, an error becomes a gRPC status with its `google.rpc` details.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from common import errors, log, tracing
from twinlens.v1 import media_pb2

DOMAIN = "twinlens"
"""The domain of our `ErrorInfo` reasons."""

MAX_ID = 128
"""Characters of the longest request id."""

_OURS = "/twinlens.v1."
_TRACED = ("Generate", "Encode", "Prefetch")
"""Calls that are part of what somebody asked for; the rest is housekeeping."""

_LAST_WORD = 1.0
"""Seconds for which a call that has failed waits until its status is sent."""

_log = log.get("rpc")


class Call:
    """A call under way, in the task that serves it."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.ending: errors.TwinlensError | None = None
        self.settled = False

    def end(self, error: errors.TwinlensError) -> None:
        """Has the handler stop where it stands, and its caller told `error`; harmless once the call has its status."""
        if self.ending is None and not self.settled:
            self.ending = error
            self._task.cancel()


_call: ContextVar[Call] = ContextVar("call")


def current() -> Call:
    """The call that this task, or one that it comes from, serves. Raises LookupError outside of one."""
    return _call.get()


class CallFrame(grpc.aio.ServerInterceptor):
    """The one interceptor. An empty `token` lets every caller in; past `most_calls` at once further ones are refused,
    health checks excepted, and once it is `closed` all of them."""

    def __init__(self, token: str, most_calls: int = 1024) -> None:
        self._token = token.encode()
        self._most_calls = most_calls
        self._calls: set[Call] = set()
        self.closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def open_calls(self) -> int:
        """Calls under way, health checks excepted."""
        return len(self._calls)

    async def empty(self) -> None:
        """Returns when no call is open, health checks excepted."""
        await self._empty.wait()

    def end_all(self, error: errors.TwinlensError) -> None:
        """Ends every call under way with `error`; `empty` tells when all have given back what they held."""
        for call in tuple(self._calls):
            call.end(error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of a call; without the right token, none is reached."""
        if not self._admits(details):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        method = details.method.rpartition("/")[2]
        # Requests are read by us: what gRPC says of bytes that it cannot read names a class.
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_stream:
            behavior = self._stream(method, handler.unary_stream, read)
            return grpc.unary_stream_rpc_method_handler(behavior, response_serializer=_or_raw(write))
        behavior = self._unary(method, handler.unary_unary, read)
        return grpc.unary_unary_rpc_method_handler(behavior, response_serializer=write)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        if not self._token:
            return True
        given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        if isinstance(given, str):
            given = given.encode()
        return hmac.compare_digest(given, b"Bearer " + self._token)

    def _unary(
        self, method: str, behavior: Callable[..., Awaitable[Any]], read: Callable[[bytes], Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(body: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await self._guarded(method, _read(body, read), context, behavior)

        return call

    def _stream(
        self, method: str, behavior: Callable[..., Any], read: Callable[[bytes], Any]
    ) -> Callable[..., Awaitable[None]]:
        """Drives a handler's generator with `context.write`, so that it is closed the moment a caller goes away."""

        async def pump(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    try:
                        await context.write(response)
                    except grpc.aio.InternalError as error:  # gRPC may say this before it cancels the handler
                        raise _CallerLeft from error

        async def call(body: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._guarded(method, _read(body, read), context, pump)

        return call

    async def _guarded(
        self,
        method: str,
        request: Any,
        context: grpc.aio.ServicerContext[Any, Any],
        run: Callable[..., Awaitable[Any]],
    ) -> Any:
        started, code = time.perf_counter(), "OK"
        call = Call()
        _call.set(call)
        self._calls.add(call)
        self._empty.clear()
        with log.bound(method=method, request_id=_name(request)):
            try:
                if self.closed:
                    raise errors.Unavailable("the service stops", reason="STOPPING")
                if self.open_calls > self._most_calls:
                    raise errors.Exhausted("too many calls are under way", reason="TOO_MANY_CALLS")
                _check(request, context)
                if method not in _TRACED:
                    return await run(request, context)
                metadata = context.invocation_metadata() or ()
                with tracing.serving(method, metadata, request_id=_name(request)):
                    return await run(request, context)
            except errors.TwinlensError as error:
                code, call.settled = error.reason, True
                await fail(context, error)
            except _CallerLeft:
                code = "CANCELLED"
                raise asyncio.CancelledError from None
            except asyncio.CancelledError:
                call.settled = True
                if call.ending is not None:
                    code = call.ending.reason
                    await fail(context, call.ending)
                code = "CANCELLED"
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    _log.exception("a handler was cancelled from inside")
                    await fail(context, errors.Internal("the service failed to handle this call"))
                # gRPC sends no status for a handler that was cancelled: a caller who is still there would wait on.
                await fail(context, errors.Unavailable("the service ended this call", reason="CALL_ENDED"))
            except Exception as error:
                if isinstance(error, grpc.aio.AbortError):
                    raise
                code, call.settled = "INTERNAL", True
                _log.exception("a handler failed")
                await fail(context, errors.Internal("the service failed to handle this call"))
            finally:
                self._calls.discard(call)
                if not self._calls:
                    self._empty.set()
                seconds = round(time.perf_counter() - started, 4)
                # Services look after each other twice a second, before they have started and while they stop.
                housekeeping = method not in _TRACED and code in ("OK", "STARTING", "STOPPING")
                (_log.debug if housekeeping else _log.info)("call", outcome=code, seconds=seconds)


class _CallerLeft(Exception):
    """Nothing can be sent on a call any more."""


def _or_raw(write: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A serializer that lets pass what a handler has serialized itself: rows, without copies of them."""
    return lambda message: message if isinstance(message, bytes) else write(message)


def _read(body: bytes, read: Callable[[bytes], Any]) -> Any:
    """The request; None for bytes that are none."""
    try:
        return read(body)
    except DecodeError:
        return None


def _name(request: Any) -> str:
    """The request's id; one is made up, and written into the request, where it has the field and left it empty."""
    if not hasattr(request, "request_id"):
        return ""
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return str(request.request_id)[:MAX_ID]


def _check(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if request is None:
        raise errors.InvalidInput("the message cannot be read", reason="MALFORMED_MESSAGE")
    for field in ("request_id", "cache_salt", "session_id"):
        if len(getattr(request, field, "")) > MAX_ID:
            raise errors.InvalidInput(f"{field} is longer than {MAX_ID} characters", reason="ID_TOO_LONG", field=field)
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:  # type: ignore[redundant-expr]  # None without a deadline
        raise errors.DeadlineExceeded("the deadline had passed when the call arrived")


async def _refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await fail(context, errors.Unauthenticated("a valid bearer token is needed"))


async def fail(context: grpc.aio.ServicerContext[Any, Any], error: errors.TwinlensError) -> NoReturn:
    """Ends a call with an error's status, its standard details, and the short form for callers without them.

    The status stands behind what was sent before. Where the caller does not read that, it is on its way all the same,
    and is not waited for: the call is over for us.
    """
    trailers = (
        ("grpc-status-details-bin", rich_status(error).SerializeToString()),
        ("twinlens-status-bin", plain_status(error).SerializeToString()),
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORD):
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
    """An error in the standard error model: ErrorInfo, BadRequest for a field, RetryInfo where a retry can help."""
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
