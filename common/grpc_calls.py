"""What surrounds every call: the token, the deadline, the request id in the logs, and errors turned into statuses.

Handlers just raise; here, and nowhere else, an error becomes a gRPC status with its `google.rpc` details.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from common import errors, log, tracing
from common.request_budget import STATED, RequestBudget
from twinlens.v1 import media_pb2

DOMAIN = "twinlens"
"""The domain of our `ErrorInfo` reasons."""

MAX_ID = 128
"""Characters of the longest request id."""

_OURS = "/twinlens.v1."
_TRACED = ("Generate", "Encode", "Prefetch")
"""Calls that are part of what somebody asked for; the rest is housekeeping."""

_STRANGERS_SECONDS = 1.0
"""From one line about callers without the token to the next."""

_MOST_ASKED = 64 << 10
"""Bytes of a message to health checks and reflection."""

_PARTING = 0.1
"""Seconds in which gRPC cancels the handler of a caller who has left, after it has said that no message comes."""

_LAST_WORD = 1.0
"""Seconds for which a call that has failed waits until its status is sent."""

_log = log.get("rpc")


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def _nobody(_reason: str) -> None:
    """Who is told of errors where no one asked to be."""


class Quiet:
    """Lets one line through in so many seconds, and counts the others: what strangers cause must not fill a disk."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._others = 0

    def says(self) -> int | None:
        """How many were not let through since the last one; None for one that is not."""
        now = time.monotonic()
        if now < self._next:
            self._others += 1
            return None
        others, self._others, self._next = self._others, 0, now + self._seconds
        return others


class Call:
    """A call under way, in the task that serves it."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.ending: errors.TwinlensError | None = None
        self.settled = False
        self.held = 0

    def end(self, error: errors.TwinlensError) -> None:
        """Has the handler stop where it stands, and its caller told `error`; harmless once the call has its status."""
        if self.ending is None and not self.settled:
            self.ending = error
            self._task.cancel()


_call: ContextVar[Call] = ContextVar("call")


def current() -> Call:
    """The call that this task, or one that it comes from, serves. Raises LookupError outside of one."""
    return _call.get()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The one interceptor. An empty `token` lets every caller in; past `max_calls` at once further ones are refused,
    health checks excepted, and once it is `closed` all of them. `budget` bounds the bytes of requests.

    To gRPC every method is one of streamed requests: of those it takes no message before it is asked to, so that each
    is read here, within bounds.
    """

    def __init__(self, token: str, max_calls: int = 1024, budget: RequestBudget | None = None) -> None:
        self._token = token.encode()
        self._max_calls = max_calls
        self._budget = budget or RequestBudget(256 << 20, 68 << 20)
        self.on_error: Callable[[str], None] = _nobody
        """Is told the reason of each call that ends in an error."""
        self._strangers = Quiet(_STRANGERS_SECONDS)
        self._calls: set[Call] = set()
        self._others: set[Call] = set()
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
        for call in (*self._calls, *self._others):
            call.end(error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of a call; without the right token, none is reached."""
        if not self._admits(details):
            return grpc.stream_stream_rpc_method_handler(self._stranger)
        handler = await continuation(details)
        if handler is None:
            return None
        # Requests are read by us: what gRPC says of bytes that it cannot read names a class.
        read, write = handler.request_deserializer, handler.response_serializer
        if not details.method.startswith(_OURS):
            return grpc.stream_stream_rpc_method_handler(self._plain(handler), response_serializer=write)
        method = details.method.rpartition("/")[2]
        if handler.unary_stream:
            stream = self._call(method, _pumped(handler.unary_stream), read)
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=_or_raw(write))
        return grpc.stream_unary_rpc_method_handler(
            self._call(method, handler.unary_unary, read), response_serializer=write
        )

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        if not self._token:
            return True
        given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        if isinstance(given, str):
            given = given.encode()
        return hmac.compare_digest(given, b"Bearer " + self._token)

    async def _stranger(self, _requests: Any, context: Context) -> NoReturn:
        error = errors.Unauthenticated("a valid bearer token is needed")
        self.on_error(error.reason)
        if (before := self._strangers.says()) is not None:
            _log.warning("refused", reason=error.reason, peer=context.peer(), others=before)
        await fail(context, error)

    def _call(
        self, method: str, run: Callable[..., Awaitable[Any]], read: Callable[[bytes], Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(_requests: Any, context: Context) -> Any:
            return await self._guarded(method, read, context, run)

        return call

    def _plain(self, handler: Any) -> Callable[..., Awaitable[None]]:
        """A handler of somebody else's: its requests are read within bounds as well."""

        async def call(_requests: Any, context: Context) -> None:
            one = Call()
            self._others.add(one)
            try:
                await self._answered(one, handler, context)
            except errors.TwinlensError as error:
                one.settled = True
                await fail(context, error)
            except asyncio.CancelledError:
                if one.ending is not None:
                    await fail(context, one.ending)
                raise
            finally:
                self._others.discard(one)

        return call

    async def _answered(self, call: Call, handler: Any, context: Context) -> None:
        """Everything that a foreign handler says, of whichever kind it is."""
        if handler.stream_stream:
            answers = handler.stream_stream(self._requests(call, handler.request_deserializer, context), context)
        else:
            request = _small(await self._body(call, context), handler.request_deserializer)
            answers = (handler.unary_unary or handler.unary_stream)(request, context)
        if isinstance(answers, Awaitable):
            answer = await answers
            if answer is not None:
                await context.write(answer)
            return
        async with aclosing(answers) as each:
            async for answer in each:
                await context.write(answer)

    async def _requests(self, call: Call, read: Callable[[bytes], Any], context: Context) -> AsyncIterator[Any]:
        while (body := await self._body(call, context)) is not None:
            yield _small(body, read)
            self._let_go(call)

    async def _body(self, call: Call, context: Context) -> bytes | None:
        """The next message of a call, within the budget; None where there is none."""
        metadata = dict(context.invocation_metadata() or ())
        stated = str(metadata.get(STATED, ""))
        async with self._budget.arrival(context.peer(), call, int(stated) if stated.isdecimal() else 0) as arrived:
            body = await context.read()
            if not isinstance(body, bytes):  # gRPC's mark of the end; of a caller who left, it says so a moment later
                await asyncio.sleep(_PARTING)
                return None
            call.held += len(body)
            arrived(len(body))
            return body

    def _let_go(self, call: Call) -> None:
        self._budget.release(call.held)
        call.held = 0

    async def _guarded(
        self, method: str, read: Callable[[bytes], Any], context: Context, run: Callable[..., Awaitable[Any]]
    ) -> Any:
        started, code = time.perf_counter(), "OK"
        call = Call()
        _call.set(call)
        self._calls.add(call)
        self._empty.clear()
        with log.bound(method=method):
            try:
                self._check_open(context)
                request = _Request(await self._body(call, context), read)
                log.bind(request_id=request.name)
                if method not in _TRACED:
                    return await run(request.take(), context)
                metadata = context.invocation_metadata() or ()
                with tracing.serving(method, metadata, request_id=request.name):
                    if trace := tracing.trace_id():
                        log.bind(trace_id=trace)
                    return await run(request.take(), context)
            except errors.TwinlensError as error:
                code, call.settled = error.reason, True
                self.on_error(code)
                await fail(context, error)
            except _CallerLeft:
                code = "CANCELLED"
                raise asyncio.CancelledError from None
            except asyncio.CancelledError:
                call.settled = True
                if call.ending is not None:
                    code = call.ending.reason
                    self.on_error(code)
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
                self.on_error(code)
                _log.exception("a handler failed")
                await fail(context, errors.Internal("the service failed to handle this call"))
            finally:
                self._let_go(call)
                self._calls.discard(call)
                if not self._calls:
                    self._empty.set()
                seconds = round(time.perf_counter() - started, 4)
                # Services look after each other twice a second, before they have started and while they stop.
                housekeeping = method not in _TRACED and code in ("OK", "STARTING", "STOPPING")
                (_log.debug if housekeeping else _log.info)("call", outcome=code, seconds=seconds)

    def _check_open(self, context: Context) -> None:
        """Raises what a call is refused with before any of its request is taken."""
        if self.closed:
            raise errors.Unavailable("the service stops", reason="STOPPING")
        if self.open_calls > self._max_calls:
            raise errors.Exhausted("too many calls are under way", reason="TOO_MANY_CALLS")
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:  # type: ignore[redundant-expr]  # None without a deadline
            raise errors.DeadlineExceeded("the deadline had passed when the call arrived")


class _Request:
    """A request and its name. Whoever takes it is the only one to hold it, and lets go of its bytes when he likes."""

    def __init__(self, body: bytes | None, read: Callable[[bytes], Any]) -> None:
        self._message = _read(body, read)
        if self._message is None:
            raise _malformed()
        self.name = _name(self._message)
        _check(self._message)

    def take(self) -> Any:
        """The message; once."""
        message, self._message = self._message, None
        return message


def _pumped(behavior: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
    """Drives a handler's generator with `context.write`, so that it is closed the moment a caller goes away."""

    async def pump(request: Any, context: Context) -> None:
        answers = behavior(request, context)
        del request  # it is the handler's
        async with aclosing(answers) as responses:
            async for response in responses:
                try:
                    await context.write(response)
                except grpc.aio.InternalError as error:  # gRPC may say this before it cancels the handler
                    raise _CallerLeft from error

    return pump


class _CallerLeft(Exception):
    """Nothing can be sent on a call any more."""


def _or_raw(write: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A serializer that lets pass what a handler has serialized itself: rows, without copies of them."""
    return lambda message: message if isinstance(message, bytes) else write(message)


def _read(body: bytes | None, read: Callable[[bytes], Any]) -> Any:
    """The request; None for bytes that are none."""
    try:
        return None if body is None else read(body)
    except DecodeError:
        return None


def _small(body: bytes | None, read: Callable[[bytes], Any]) -> Any:
    """A request of health checks or reflection: the latter sends back what it is asked."""
    if body is not None and len(body) > _MOST_ASKED:
        raise errors.InvalidInput("the message is too long for its method", reason="MESSAGE_TOO_LONG")
    if (request := _read(body, read)) is None:
        raise _malformed()
    return request


def _name(request: Any) -> str:
    """The request's id; one is made up, and written into the request, where it has the field and left it empty."""
    if not hasattr(request, "request_id"):
        return ""
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return str(request.request_id)[:MAX_ID]


def _check(request: Any) -> None:
    for field in ("request_id", "cache_salt", "session_id"):
        if len(getattr(request, field, "")) > MAX_ID:
            raise errors.InvalidInput(f"{field} is longer than {MAX_ID} characters", reason="ID_TOO_LONG", field=field)


def _malformed() -> errors.InvalidInput:
    return errors.InvalidInput("the message cannot be read", reason="MALFORMED_MESSAGE")


async def fail(context: Context, error: errors.TwinlensError) -> NoReturn:
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
