"""One request in progress, as its handler knows it: body, id, and remaining time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from common.aio import tasks
from common.errors import Exhausted, TwinlensError
from common.process.malloc import give_back
from common.telemetry import log, tracing
from gateway.api.fields import IdFields
from gateway.callers import Caller
from gateway.dialect import OpenAI
from gateway.errors import TooLarge, from_validation

SCOPE_KEY = "twinlens.request"
"""The key of a request's `RequestContext` in its scope."""
_SMALL_BODY = 256 << 10
"""Bytes of a body that is read on the event loop; a larger one is read, and taken further, in a thread."""
_LARGE_BODY = 8 << 20
"""Bytes of a body after which free memory is returned to the system, and"""
_TIDY_SECONDS = 1.0
"""the delay: by then nobody holds any of it."""
_MOST_MARKS = 1 << 20
"""Commas and brackets in a body; with more of them, parsing would take hundreds of times its size."""

Body = TypeVar("Body", bound=BaseModel)
Made = TypeVar("Made")


class BodyBudget:
    """Bytes of all bodies in memory, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self.limit = limit
        self._tidying = False

    def tidy(self) -> None:
        """A large body is released. It came in small pieces, whose memory the allocator may keep unless asked to return
        it."""
        if not self._tidying:
            self._tidying = True
            asyncio.get_running_loop().call_later(_TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._tidying = False
        tasks.in_daemon_thread(give_back)  # off the event loop, since it takes time


class BodyLease:
    """Bytes of one body, until it is handed on."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, count: int) -> None:
        """Raises Exhausted if all bodies together are too large."""
        self.bytes += count
        self._budget.bytes += count
        if self._budget.bytes > self._budget.limit:
            raise Exhausted("requests hold too many bytes", reason="TOO_MANY_BYTES")

    def release(self) -> None:
        """The body is released."""
        if self.bytes >= _LARGE_BODY:
            self._budget.tidy()
        self._budget.bytes -= self.bytes
        self.bytes = 0


@dataclass(eq=False, slots=True)
class RequestContext:
    """One request in progress. `metadata` is passed on to the LLM service, `caller` is the authenticated caller."""

    id: str
    metadata: Sequence[tuple[str, str]]
    body_lease: BodyLease
    dialect: OpenAI
    caller: Caller = field(default_factory=Caller)
    body: bytes = b""
    is_large: bool = False
    surface: str = "other"
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    cause: TwinlensError | None = None
    status: int = 0
    first_byte: float = 0.0
    streams: bool = False
    failing: Callable[[TwinlensError], bytes] | None = None
    """The last event of a failing stream on this surface; by default the dialect's."""

    has_several: bool = False
    """Whether it has several prompts."""

    pause: float = math.inf
    last: float = math.inf
    """Seconds for which the answer may make no progress; and the latest end on the loop's clock."""

    @property
    def seconds_left(self) -> float:
        """Until its time is over, if nothing comes of its answer."""
        until = self.limit.when()
        return math.inf if until is None else until - asyncio.get_running_loop().time()

    def end(self, cause: TwinlensError) -> None:
        """Ends the request; its caller is told the cause."""
        if self.cause is None:
            self.cause = cause
            with suppress(RuntimeError):  # its time has just run out, and it ends already
                self.limit.reschedule(asyncio.get_running_loop().time())

    def gets_on(self) -> None:
        """The answer has made progress: it gets more time. The timer is only reset now and then, since this is called
        for each token."""
        if self.cause is None and (until := self.limit.when()) is not None:
            wanted = min(self.last, asyncio.get_running_loop().time() + self.pause)
            if wanted - until > self.pause / 16:
                with suppress(RuntimeError):  # its time has just run out
                    self.limit.reschedule(wanted)

    async def read(self, kind: type[Body]) -> Body:
        """The parsed body. Raises InvalidInput, which names the field."""
        body, self.body = self.body, b""
        self.is_large = len(body) >= _SMALL_BODY
        asked: Body = await self.made(_read, kind, body)
        self.take_name(asked)
        return asked

    def take_name(self, asked: BaseModel) -> None:
        """A name in the body goes before that of the header, which a proxy may have set."""
        if isinstance(asked, IdFields) and asked.stated_id:
            self.id = asked.stated_id
            log.bind(request_id=self.id)
            tracing.describe(request_id=self.id)

    async def made(self, make: Callable[..., Made], *args: Any) -> Made:
        """The result of `make` for a body that may have hundreds of thousands of parts."""
        return await tasks.to_thread(make, *args) if self.is_large else make(*args)


def _read(kind: type[Body], body: bytes) -> Body:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MOST_MARKS:
        raise TooLarge("the body has too many parts", reason="BODY_TOO_COMPLEX")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


def context_of(request: Request, surface: str) -> RequestContext:
    """The context of a request, which counts towards this surface from now on."""
    context: RequestContext = request.scope[SCOPE_KEY]
    context.surface = surface
    return context
