"""Surrounds every request: token, limits, body, request id, time limit, disconnects, and errors. Handlers just raise;
errors become responses here and nowhere else."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.aio import tasks
from common.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    Internal,
    TwinlensError,
    Unauthenticated,
    Unavailable,
)
from common.telemetry import log, tracing
from gateway.config import GatewayConfig
from gateway.connection import ABORT
from gateway.dialect import dialect_of
from gateway.errors import Compressed, NoRoute, Stalled, TooLarge, headers_of, status_of
from gateway.hosts import Hosts
from gateway.meters import Meters
from gateway.request_context import SCOPE_KEY, BodyBudget, BodyLease, RequestContext
from gateway.stream import EVENTS

_log = log.get("middleware")

_JSON: Final = (b"content-type", b"application/json")
_OPEN = ("/health", "/ping", "/metrics", "/version", "/page/")
"""Paths, besides the page's own, that need no token and do not count as requests."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LEFT_STATUS = 499
_LONGEST_TRACE = 512
"""Longest trace context header that is passed on, in characters: W3C's minimum. gRPC fails calls with kilobytes of
it."""


class RequestMiddleware:
    """Surrounds an application, which finds a `RequestContext` in its scope."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, meters: Meters) -> None:
        self._app = app
        self._config = config
        self._callers = config.callers()
        self._hosts = Hosts(config)
        self._meters = meters
        self._requests: set[RequestContext] = set()
        self.body_budget = BodyBudget(config.max_inflight_bytes)
        self.draining = False
        self._closed = False

    @property
    def open_requests(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def end_all(self, cause: TwinlensError) -> None:
        """Ends every request under way, and lets no other in."""
        self._closed = True
        for context in list(self._requests):
            context.end(cause)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        stated = headers.get(b"x-request-id", "")
        context = RequestContext(
            stated if _ID.fullmatch(stated) else uuid.uuid4().hex,
            _trace_context(headers),
            BodyLease(self.body_budget),
            dialect_of(scope["path"], headers),
        )
        scope.update({"app": self, SCOPE_KEY: context})
        if scope["path"] == "/" or scope["path"].startswith(_OPEN):
            return await self._guarded(scope, send, context, lambda out: self._open(scope, receive, out, headers))
        self._requests.add(context)
        begun = time.perf_counter()
        try:
            with (
                log.bound(request_id=context.id),
                tracing.serving(f"{scope['method']} {scope['path'][:64]}", context.metadata, request_id=context.id),
            ):
                if mine := tracing.outgoing():
                    context.metadata = mine
                    log.bind(trace_id=tracing.trace_id())
                await self._guarded(
                    scope, send, context, lambda out: self._serve(scope, receive, out, context, headers)
                )
        finally:
            self._requests.discard(context)
            seconds = time.perf_counter() - begun
            more: dict[str, Any] = {"caller": context.caller.name} if context.caller.name else {}
            if context.first_byte:
                self._meters.first_byte(context.surface, context.first_byte - begun)
                more["first_byte_seconds"] = round(context.first_byte - begun, 4)
            self._meters.ended(context.surface, context.status, seconds, context.caller.name)
            outcome = context.cause.reason if context.cause else "OK"
            stranger = context.status == HTTPStatus.UNAUTHORIZED  # counted, but no way to fill the log
            (_log.debug if stranger or context.surface == "load" else _log.info)(  # that is asked for each second
                "request",
                request_id=context.id,
                surface=context.surface,
                status=context.status,
                outcome=outcome,
                seconds=round(seconds, 4),
                **more,
            )

    async def _open(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, str]) -> None:
        """Answers requests that everybody may make."""
        self._check_host(headers)
        await self._app(scope, receive, send)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, context: RequestContext, headers: dict[bytes, str]
    ) -> None:
        """Admits a request, and runs the application as long as the client is there."""
        self._check(context, headers)
        try:
            context.body = await self._body(receive, headers, context.body_lease)
            watcher = asyncio.create_task(_end_on_disconnect(receive, context))
            try:
                await self._app(scope, receive, send)
            finally:
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await watcher
        finally:
            context.body_lease.release()

    def _check(self, context: RequestContext, headers: dict[bytes, str]) -> None:
        """Raises the refusal of a request, if any, before its body is read."""
        self._check_host(headers)
        caller = self._callers.known(context.dialect.tokens(headers))
        if caller is None:
            raise Unauthenticated("a bearer token is needed")
        context.caller = caller
        if caller.name:
            log.bind(caller=caller.name)
        if self._closed:
            raise Unavailable("the gateway stops", reason="STOPPING")
        if self.open_requests > self._config.max_requests:
            raise Exhausted("too many requests are being served", reason="TOO_MANY_REQUESTS")
        if headers.get(b"content-encoding", "identity").lower() not in ("", "identity"):
            why = "compressed bodies are not accepted"
            raise Compressed(why, reason="ENCODING_NOT_SERVED", field="content-encoding")

    def _check_host(self, headers: dict[bytes, str]) -> None:
        if not self._hosts.allow(headers.get(b"host", "")):
            why = "a gateway on loopback without tokens does not accept this host name; --allow-hosts adds names"
            raise Forbidden(why, reason="HOST_NOT_ALLOWED")

    async def _body(self, receive: Receive, headers: dict[bytes, str], lease: BodyLease) -> bytes:
        """The whole body, within its bounds."""
        stated = headers.get(b"content-length", "")
        self._check_size(int(stated) if stated.isdecimal() else 0)
        parts: list[bytes] = []
        while True:
            try:
                async with tasks.StallTolerantTimeout(self._config.request_stall_seconds):
                    message = await receive()
            except TimeoutError:
                why = "the request brought no data for too long"
                raise Stalled(why, reason="REQUEST_TOO_SLOW", retry_after=1.0) from None
            if message["type"] == "http.disconnect":
                raise Cancelled("the caller has left")
            part = message.get("body", b"")
            self._check_size(lease.bytes + len(part))
            lease.take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check_size(self, count: int) -> None:
        if count > self._config.max_body_bytes:
            limit = self._config.max_body_bytes
            raise TooLarge(f"a request's body may have {limit} bytes", reason="BODY_TOO_LARGE")

    async def _guarded(
        self, scope: Scope, send: Send, context: RequestContext, serve: Callable[[Send], Awaitable[None]]
    ) -> None:
        """Runs `serve` within the request's time limit, and responds with any error."""
        out = _BoundedSend(send, context, scope["extensions"][ABORT], self._config.answer_stall_seconds)
        try:
            error = await self._outcome(context, serve(out))
            if error is not None:
                # Its causes hold the body; as part of a cycle they would do so until garbage collection.
                error.__traceback__ = error.__context__ = None
                context.cause = error
                tracing.failed(error.reason)
                await out.fail(error)
        finally:
            out.close()

    async def _outcome(self, context: RequestContext, serving: Awaitable[None]) -> TwinlensError | None:
        """Waits for the answer, as long as a request may take; the error that has ended it."""
        loop = asyncio.get_running_loop()
        try:
            now, context.pause = loop.time(), self._config.request_seconds
            context.last = now + self._config.longest_seconds
            context.limit = asyncio.timeout_at(now + context.pause)
            async with context.limit:
                await serving
        except TimeoutError:
            return context.cause or DeadlineExceeded("the request took too long")
        except TwinlensError as stated:
            return stated
        except HTTPException as stated:
            if stated.status_code == 404:
                return NoRoute(404, "there is nothing at this path; OpenAI's API is below /v1")
            allowed = (stated.headers or {}).get("Allow", "")
            return NoRoute(stated.status_code, f"this path accepts only {allowed}", allowed)
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets an answer, and the log the rest
            _log.exception("a handler failed")
            return Internal("the gateway failed to handle this request")
        return None


class _BoundedSend:
    """Sends a response: each part in bounded time, and the request id with the first.

    One timer serves all parts: a part is one token, and a timer for each would cost as much as sending it.
    """

    def __init__(self, send: Send, context: RequestContext, abort: Callable[[], None], seconds: float) -> None:
        self._send = send
        self._context = context
        self._abort = abort
        self._seconds = seconds
        self._complete = False
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._timer = tasks.StallTolerantTimer(seconds, self._look)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._timer.cancel()

    def _look(self) -> None:
        """Gives up on a client that has read nothing of a part for too long; otherwise schedules the next check."""
        now = self._loop.time()
        since = now if self._sending_since is None else self._sending_since
        if now - since < self._seconds:
            self._timer = tasks.StallTolerantTimer(since + self._seconds - now, self._look)
            return
        self._abort()
        self._context.end(Unavailable("the caller does not read the answer", reason="CALLER_STALLED"))

    async def __call__(self, message: Message) -> None:
        context = self._context
        if message["type"] == "http.response.start":
            context.status = message["status"]
            named = ((name, context.id.encode()) for name in context.dialect.id_headers)
            message["headers"] = [*message.get("headers", ()), *named]
            context.streams = any(value.startswith(EVENTS.encode()) for _, value in message["headers"])
        else:
            context.first_byte = context.first_byte or time.perf_counter()
            self._complete = not message.get("more_body", False)
        self._sending_since = self._loop.time()
        await self._send(message)
        self._sending_since = None

    async def fail(self, error: TwinlensError) -> None:
        """Responds with an error: as a response, or as the last event of a stream that has begun."""
        if isinstance(error, Cancelled) and error.reason == Cancelled.default_reason:
            self._context.status = _LEFT_STATUS
            self._abort()
        elif self._complete or error.reason == "CALLER_STALLED":
            return
        elif not self._context.status:
            content = self._context.dialect.error(error, self._context.id)
            length = (b"content-length", b"%d" % len(content))
            headers = [_JSON, length, *headers_of(error)]
            await self({"type": "http.response.start", "status": status_of(error), "headers": headers})
            await self({"type": "http.response.body", "body": content})
        elif self._context.streams:
            told = self._context.failing or self._as_event
            await self({"type": "http.response.body", "body": told(error)})
        else:
            self._abort()

    def _as_event(self, error: TwinlensError) -> bytes:
        dialect = self._context.dialect
        return b"%sdata: %s\n\n" % (dialect.error_event, dialect.error(error, self._context.id))


async def _end_on_disconnect(receive: Receive, context: RequestContext) -> None:
    """Ends a request whose client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    context.end(Cancelled("the caller has left"))


def _trace_context(headers: dict[bytes, str]) -> list[tuple[str, str]]:
    """The client's trace context, if it can be passed on."""
    found = ((name, headers.get(name.encode(), "")) for name in ("traceparent", "tracestate"))
    return [
        (name, value)
        for name, value in found
        if 0 < len(value) <= _LONGEST_TRACE and value.isascii() and value.isprintable()
    ]
