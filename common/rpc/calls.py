"""Surrounds every call: token, deadline, request id in the logs, and errors turned into statuses.

Handlers just raise; errors become gRPC statuses with their `google.rpc` details here and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc

from common import errors
from common.aio import tasks
from common.errors import CALLER_STALLED
from common.rpc.auth import BearerToken
from common.rpc.bearer_tokens import AcceptedTokens
from common.rpc.deadlines import has_run_out
from common.rpc.request_budget import RequestBudget
from common.rpc.requests import CallReader
from common.rpc.status import Context, fail
from common.telemetry import log, tracing

_OURS = "/twinlens.v1."
_TRACED = ("Generate", "Embed", "Encode", "Prefetch", "Prefill")
"""Calls that belong to a user's request; the rest is housekeeping."""
_EXPECTED = ("OK", "STARTING", "STOPPING", "ENGINE_UNAVAILABLE")
"""Ends of housekeeping that fill no log: it is asked again and again, and an engine's end is told by its owner."""

_CANCELLED, _TOO_LATE = _LEFT = ("CANCELLED", "DEADLINE_EXCEEDED")
"""Ends of a call by its caller, or by the deadline that he has set."""

_log = log.get("rpc")

Handler = Callable[[Any, Context], Awaitable[Any]]
"""Answers a request on the context of its call."""


def _nobody(_reason: str) -> None:
    """The default listener for errors."""


class Call:
    """A call under way, in the task that serves it."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] | None = task
        self.ending: errors.TwinlensError | None = None
        self.answered = False
        self.complete = False
        """The handler has nothing to send behind its present message: a caller who leaves now has got everything."""
        self._stall_limit: StallLimit | None = None

    def end(self, error: errors.TwinlensError) -> None:
        """Stops the handler, and ends the call with `error`; has no effect once the call has its status."""
        if self._task is not None and self.ending is None and not self.answered:
            self.ending = error
            self._task.cancel()

    def limit_stalls(self, seconds: float) -> None:
        """Ends the call if its client takes longer than this to accept a message that holds resources."""
        self._stall_limit = StallLimit(self, seconds)

    async def accept(self, context: Context) -> None:
        """Tells the caller that his request is here, whenever the first answer to it comes."""
        try:
            await context.send_initial_metadata(())
        except grpc.aio.InternalError as error:
            raise _CallerLeft from error

    async def write(self, message: Any, context: Context) -> None:
        """Hands a message over, and returns when its caller has room for it."""
        if self._stall_limit is None:
            await context.write(message)
        else:
            with self._stall_limit:
                await context.write(message)

    def close(self) -> None:
        """The call is over: drops references back to it, including its task, whose context it is in. A cycle would keep
        everything that it held until garbage collection."""
        self._task = None
        if self._stall_limit is not None:
            self._stall_limit.close()
            self._stall_limit = None


class StallLimit:
    """A context around each message sent: ends the call if one takes longer than `seconds`. One timer serves all
    messages, since a message may be one token, and a timer for each would cost as much as sending it."""

    def __init__(self, call: Call, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = tasks.StallTolerantTimer(seconds, self._look)

    def close(self) -> None:
        """No more messages come."""
        self._timer.cancel()

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def _look(self) -> None:
        """Ends the call, or looks again when the time of the message that is being handed over could be up."""
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since < self._seconds:
            self._timer = tasks.StallTolerantTimer(since + self._seconds - now, self._look)
            return
        self._call.end(errors.Unavailable("the caller took too long to accept a message", reason=CALLER_STALLED))


_call: ContextVar[Call] = ContextVar("call")


def current() -> Call:
    """The call that this task, or one that it comes from, serves. Raises LookupError outside of one."""
    return _call.get()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The only interceptor. Callers must send one of the `accepted` tokens, if there are any; beyond `max_calls` at
    once further calls are refused, except health checks, and all calls once it is `closed`. `budget` bounds the bytes
    of requests.

    gRPC treats every method as one of streamed requests: it reads no message of these before it is asked to, so each is
    read here, within bounds.
    """

    def __init__(self, accepted: AcceptedTokens, max_calls: int = 1024, budget: RequestBudget | None = None) -> None:
        self._token = BearerToken(accepted)
        self._max_calls = max_calls
        self._budget = budget or RequestBudget(256 << 20, 68 << 20)
        self.on_error: Callable[[str], None] = _nobody
        """Is told the reason of each call that ends in an error."""
        self._calls: set[Call] = set()
        self._foreign_calls: set[Call] = set()
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
        """Ends all calls in progress with `error`; `empty` is set when all have given back what they held."""
        for call in (*self._calls, *self._foreign_calls):
            call.end(error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of a call; without the right token, none is reached."""
        if not self._token.admits(details):
            return grpc.stream_stream_rpc_method_handler(self._refuse)
        handler = await continuation(details)
        if handler is None:
            return None
        write = handler.response_serializer
        if not details.method.startswith(_OURS):
            return grpc.stream_stream_rpc_method_handler(self._foreign(handler), response_serializer=write)
        method, deserialize = details.method.rpartition("/")[2], handler.request_deserializer
        if handler.unary_stream:
            stream = self._ours(method, deserialize, _pumped(handler.unary_stream))
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=_or_raw(write))
        return grpc.stream_unary_rpc_method_handler(
            self._ours(method, deserialize, handler.unary_unary), response_serializer=write
        )

    async def _refuse(self, _requests: Any, context: Context) -> NoReturn:
        await self._token.refuse(context, self.on_error)

    def _foreign(self, handler: Any) -> Handler:
        """A handler that is not ours: its requests are read within bounds as well."""

        async def serve(_requests: Any, context: Context) -> None:
            call = Call()
            requests = CallReader(call, context, handler.request_deserializer, self._budget)
            self._foreign_calls.add(call)
            try:
                ending = None
                try:
                    await _answer_foreign(handler, requests, context)
                except errors.TwinlensError as error:
                    call.answered, ending = True, error
                except asyncio.CancelledError:
                    if call.ending is None:
                        raise
                    ending = call.ending
                if ending is not None:
                    await fail(context, errors.without_traces(ending))
            finally:
                call.close()
                requests.release()
                self._foreign_calls.discard(call)

        return serve

    def _ours(self, method: str, deserialize: Callable[[bytes], Any], run: Handler) -> Handler:
        async def serve(_requests: Any, context: Context) -> Any:
            started, outcome, call = time.perf_counter(), "OK", Call()
            requests = CallReader(call, context, deserialize, self._budget)
            _call.set(call)
            self._calls.add(call)
            self._empty.clear()
            with log.bound(method=method):
                try:
                    answer, ending = None, None
                    try:
                        self._check_open(context)
                        answer = await _answer(method, requests, context, run)
                    except _CallerLeft:
                        outcome = self._left(call, context, started)
                    except Exception as error:
                        if isinstance(error, grpc.aio.AbortError):
                            raise
                        ending = self._failed(error)
                        outcome = ending.reason
                    except asyncio.CancelledError:
                        outcome = call.ending.reason if call.ending else self._left(call, context, started)
                        ending = self._cancelled(call)
                    # Not while an error is handled: gRPC keeps the exception that ends a call in a cycle, with the
                    # handled one, its frames, and everything that these hold.
                    if ending is not None:
                        call.answered = True
                        await fail(context, errors.without_traces(ending))
                    if outcome in _LEFT:
                        raise asyncio.CancelledError
                    return answer
                finally:
                    call.close()
                    requests.release()
                    self._calls.discard(call)
                    if not self._calls:
                        self._empty.set()
                    seconds = round(time.perf_counter() - started, 4)
                    # Services look after each other twice a second, before they have started and while they stop.
                    housekeeping = method not in _TRACED and outcome in _EXPECTED
                    (_log.debug if housekeeping else _log.info)("call", outcome=outcome, seconds=seconds)

        return serve

    def _left(self, call: Call, context: Context, started: float) -> str:
        """The outcome of a call whose client is gone: if its deadline has passed, it has got an error."""
        if call.complete:
            return "OK"
        if not has_run_out(time.perf_counter() - started, context.time_remaining()):
            return _CANCELLED
        self.on_error(_TOO_LATE)
        return _TOO_LATE

    def _failed(self, error: Exception) -> errors.TwinlensError:
        """The caller's error for an exception in the handler."""
        if not isinstance(error, errors.TwinlensError):
            _log.exception("a handler failed")
            error = errors.Internal("the service failed to handle this call")
        self.on_error(error.reason)
        return error

    def _cancelled(self, call: Call) -> errors.TwinlensError:
        """The same for a call whose task was cancelled: by us, by its handler, or by gRPC because the client has
        left."""
        if call.ending is not None:
            self.on_error(call.ending.reason)
            return call.ending
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            _log.exception("a handler was cancelled from inside")
            return errors.Internal("the service failed to handle this call")
        # gRPC sends no status for a cancelled handler: a client that is still there would wait forever.
        return errors.Unavailable("the service ended this call", reason="CALL_ENDED")

    def _check_open(self, context: Context) -> None:
        """Raises the refusal of a call, if any, before its request is read."""
        if self.closed:
            raise errors.Unavailable("the service stops", reason="STOPPING")
        if self.open_calls > self._max_calls:
            raise errors.Exhausted("too many calls are being served", reason="TOO_MANY_CALLS")
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:  # type: ignore[redundant-expr]  # None without a deadline
            raise errors.DeadlineExceeded("the deadline had passed when the call arrived")


async def _answer(method: str, requests: CallReader, context: Context, run: Handler) -> Any:
    """Our handler's response; its span is part of the caller's trace."""
    request = await requests.named()
    log.bind(request_id=request.id)
    if method not in _TRACED:
        return await run(request.take(), context)
    with tracing.serving(method, context.invocation_metadata() or (), request_id=request.id):
        if trace := tracing.trace_id():
            log.bind(trace_id=trace)
        return await run(request.take(), context)


async def _answer_foreign(handler: Any, requests: CallReader, context: Context) -> None:
    """The responses of a handler that is not ours, of any kind."""
    if handler.stream_stream:
        answers = handler.stream_stream(requests.stream(), context)
    else:
        answers = (handler.unary_unary or handler.unary_stream)(await requests.foreign(), context)
    if isinstance(answers, Awaitable):
        answer = await answers
        if answer is not None:
            await context.write(answer)
        return
    async with aclosing(answers) as each:
        async for answer in each:
            await context.write(answer)


def _pumped(behavior: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
    """Drives a handler's generator with `context.write`, so that it is closed the moment a caller goes away."""

    async def pump(request: Any, context: Context) -> None:
        call, answers = current(), behavior(request, context)
        del request  # it is the handler's
        async with aclosing(answers) as responses:
            async for response in responses:
                try:
                    await call.write(response, context)
                except grpc.aio.InternalError as error:  # gRPC may say this before it cancels the handler
                    raise _CallerLeft from error

    return pump


class _CallerLeft(Exception):
    """Nothing can be sent on a call any more."""


def _or_raw(write: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A serializer that passes through what a handler has serialized itself: rows, without copying them."""
    return lambda message: message if isinstance(message, bytes) else write(message)
