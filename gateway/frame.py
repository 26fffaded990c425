"""What surrounds every request: the token, the limits, the body, the request's id, the time that it has, a caller who
leaves, and errors turned into answers. Handlers just raise; here, and nowhere else, an error becomes an answer."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common import log, tracing
from common.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidInput,
    TwinlensError,
    Unauthenticated,
    Unavailable,
)
from gateway.config import GatewayConfig
from gateway.connection import ABORT
from gateway.errors import NoRoute, TooLarge, body_of, from_validation, headers_of, status_of
from gateway.meters import Meters
from gateway.stream import EVENTS

_log = log.get("frame")

_JSON: Final = (b"content-type", b"application/json")
_OPEN = ("/health/", "/metrics", "/version")
"""Paths that neither need a token nor count as requests."""
_SMALL_BODY = 256 << 10
"""Bytes of a body that is read on the event loop; a larger one is read in a thread."""
_MOST_MARKS = 1 << 20
"""Commas and brackets of a body: what has more of them would take hundreds of times its size once it is read."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LEFT_STATUS = 499

Body = TypeVar("Body", bound=BaseModel)


class Bodies:
    """Bytes of all bodies that are held, of which there are `most`."""

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self.most = most


class Held:
    """Bytes of one body, until it is handed on."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.bytes = 0

    def take(self, count: int) -> None:
        """Raises Exhausted where all bodies together are too large."""
        self.bytes += count
        self._bodies.bytes += count
        if self._bodies.bytes > self._bodies.most:
            raise Exhausted("too many bytes of requests are here", reason="TOO_MANY_BYTES")

    def release(self) -> None:
        """Nothing of it is held any more."""
        self._bodies.bytes -= self.bytes
        self.bytes = 0


@dataclass(eq=False, slots=True)
class Call:
    """One request under way. `metadata` is what goes along to the LLM service with it, `held` what its body counts."""

    id: str
    metadata: Sequence[tuple[str, str]]
    held: Held
    body: bytes = b""
    surface: str = "other"
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    cause: TwinlensError | None = None
    status: int = 0
    first_byte: float = 0.0
    streams: bool = False

    def end(self, cause: TwinlensError) -> None:
        """Ends the request; its caller is told the cause."""
        if self.cause is None:
            self.cause = cause
            self.limit.reschedule(asyncio.get_running_loop().time())

    async def read(self, kind: type[Body]) -> Body:
        """The body, as what it should be. Raises InvalidInput, which says what is wrong and where."""
        body, self.body = self.body, b""
        if len(body) < _SMALL_BODY:
            return _read(kind, body)
        return await asyncio.to_thread(_read, kind, body)


def _read(kind: type[Body], body: bytes) -> Body:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MOST_MARKS:
        raise TooLarge("the body has too many parts", reason="BODY_TOO_COMPLEX")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


class Frame:
    """Surrounds an application. `Call` is in its scope, under `twinlens.call`."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, meters: Meters) -> None:
        self._app = app
        self._config = config
        self._tokens = config.tokens()
        self._meters = meters
        self._calls: set[Call] = set()
        self.bodies = Bodies(config.max_inflight_bytes)
        self.closed = False

    @property
    def open_calls(self) -> int:
        """Requests under way."""
        return len(self._calls)

    def end_all(self, cause: TwinlensError) -> None:
        """Ends every request under way."""
        for call in list(self._calls):
            call.end(cause)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        stated = headers.get(b"x-request-id", "")
        call = Call(stated if _ID.fullmatch(stated) else uuid.uuid4().hex, _context(headers), Held(self.bodies))
        scope.update({"app": self, "twinlens.call": call})
        if scope["path"].startswith(_OPEN):
            return await self._guarded(scope, send, call, lambda out: self._app(scope, receive, out))
        self._calls.add(call)
        begun = time.perf_counter()
        try:
            with (
                log.bound(request_id=call.id),
                tracing.serving(f"{scope['method']} {scope['path'][:64]}", call.metadata, request_id=call.id),
            ):
                if mine := tracing.outgoing():
                    call.metadata = mine
                await self._guarded(scope, send, call, lambda out: self._serve(scope, receive, out, call, headers))
        finally:
            self._calls.discard(call)
            seconds = time.perf_counter() - begun
            if call.first_byte:
                self._meters.first_byte(call.surface, call.first_byte - begun)
            self._meters.ended(call.surface, call.status, seconds)
            outcome = call.cause.reason if call.cause else "OK"
            stranger = call.status == HTTPStatus.UNAUTHORIZED  # counted, but no way to fill the log
            (_log.debug if stranger else _log.info)(
                "request",
                request_id=call.id,
                surface=call.surface,
                status=call.status,
                outcome=outcome,
                seconds=round(seconds, 4),
            )

    async def _serve(self, scope: Scope, receive: Receive, send: Send, call: Call, headers: dict[bytes, str]) -> None:
        """Lets a request in, and the application answer it for as long as the caller is there."""
        self._check(headers)
        stated = headers.get(b"x-request-id", "")
        if stated and stated != call.id:
            raise InvalidInput(
                "an id has 1 to 128 printable ASCII characters", reason="ID_TOO_LONG", field="x-request-id"
            )
        try:
            call.body = await self._body(receive, headers, call.held)
            watcher = asyncio.create_task(_watch(receive, call))
            try:
                await self._app(scope, receive, send)
            finally:
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await watcher
        finally:
            call.held.release()

    def _check(self, headers: dict[bytes, str]) -> None:
        """Raises what a request is refused with before any of its body is taken."""
        if self._tokens:
            kind, _, token = headers.get(b"authorization", "").partition(" ")
            given = token.strip().encode("latin-1") if kind.lower() == "bearer" else b""
            if not sum(hmac.compare_digest(given, each) for each in self._tokens):  # all are compared
                raise Unauthenticated("a bearer token is needed")
        if self.closed:
            raise Unavailable("the gateway stops", reason="STOPPING")
        if self.open_calls > self._config.max_requests:
            raise Exhausted("too many requests are under way", reason="TOO_MANY_REQUESTS")

    async def _body(self, receive: Receive, headers: dict[bytes, str], held: Held) -> bytes:
        """The whole body, within its bounds."""
        stated = headers.get(b"content-length", "")
        self._check_size(int(stated) if stated.isdecimal() else 0)
        parts: list[bytes] = []
        while True:
            try:
                async with asyncio.timeout(self._config.request_stall_seconds):
                    message = await receive()
            except TimeoutError:
                raise Exhausted("nothing of the request came for too long", reason="REQUEST_TOO_SLOW") from None
            if message["type"] == "http.disconnect":
                raise Cancelled("the caller has left")
            part = message.get("body", b"")
            self._check_size(held.bytes + len(part))
            held.take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check_size(self, count: int) -> None:
        if count > self._config.max_body_bytes:
            most = self._config.max_body_bytes
            raise TooLarge(f"a request's body may have {most} bytes", reason="BODY_TOO_LARGE")

    async def _guarded(self, scope: Scope, send: Send, call: Call, serve: Callable[[Send], Awaitable[None]]) -> None:
        """Runs `serve`, in the time that a request has, and answers with whatever error ends it."""
        out = _Out(send, call, scope["extensions"][ABORT], self._config.answer_stall_seconds)
        loop = asyncio.get_running_loop()
        try:
            call.limit = asyncio.timeout_at(loop.time() + self._config.request_seconds)
            async with call.limit:
                await serve(out)
            return
        except TimeoutError:
            error = call.cause or DeadlineExceeded("the request took too long")
        except TwinlensError as stated:
            error = stated
        except HTTPException as stated:
            what = "there is nothing at this path" if stated.status_code == 404 else "this path has other methods"
            error = NoRoute(stated.status_code, what)
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets an answer, and the log the rest
            _log.exception("a handler failed")
            error = Internal("the gateway failed to handle this request")
        call.cause = error
        tracing.failed(error.reason)
        await out.fail(error)


class _Out:
    """Sends an answer: each part in bounded time, and the request's id with the first."""

    def __init__(self, send: Send, call: Call, abort: Callable[[], None], seconds: float) -> None:
        self._send = send
        self._call = call
        self._abort = abort
        self._seconds = seconds
        self._complete = False

    async def __call__(self, message: Message) -> None:
        call = self._call
        if message["type"] == "http.response.start":
            call.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.id.encode())]
            call.streams = any(value.startswith(EVENTS.encode()) for _, value in message["headers"])
        else:
            call.first_byte = call.first_byte or time.perf_counter()
            self._complete = not message.get("more_body", False)
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            self._abort()
            raise Unavailable("the caller takes nothing of the answer", reason="CALLER_STALLED") from None

    async def fail(self, error: TwinlensError) -> None:
        """Answers with an error: as such, or, where a stream of events has begun, as its last event."""
        if isinstance(error, Cancelled) and error.reason == Cancelled.default_reason:
            self._call.status = _LEFT_STATUS
            self._abort()
        elif self._complete or error.reason == "CALLER_STALLED":
            return
        elif not self._call.status:
            content = body_of(error)
            length = (b"content-length", b"%d" % len(content))
            headers = [_JSON, length, *headers_of(error)]
            await self({"type": "http.response.start", "status": status_of(error), "headers": headers})
            await self({"type": "http.response.body", "body": content})
        elif self._call.streams:
            await self({"type": "http.response.body", "body": b"data: " + body_of(error) + b"\n\n"})
        else:
            self._abort()


async def _watch(receive: Receive, call: Call) -> None:
    """Ends a call whose caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.end(Cancelled("the caller has left"))


def _context(headers: dict[bytes, str]) -> list[tuple[str, str]]:
    """The caller's trace context, where it can be sent on."""
    found = ((name, headers.get(name.encode(), "")) for name in ("traceparent", "tracestate"))
    return [(name, value) for name, value in found if value and value.isascii() and value.isprintable()]
