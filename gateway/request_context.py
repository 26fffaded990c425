"""One request under way, as whoever answers it knows it: its body, its id, the time that it has."""

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
from gateway.callers import Caller
from gateway.dialect import OpenAI
from gateway.errors import TooLarge, from_validation

SCOPE_KEY = "twinlens.request"
"""Where a request's `RequestContext` is in its scope."""
_SMALL_BODY = 256 << 10
"""Bytes of a body that is read on the event loop; a larger one is read, and taken further, in a thread."""
_LARGE_BODY = 8 << 20
"""Bytes of a body after which free memory goes back to the system, and"""
_TIDY_SECONDS = 1.0
"""how soon: by then nobody has any of it."""
_MOST_MARKS = 1 << 20
"""Commas and brackets of a body: what has more of them would take hundreds of times its size once it is read."""

Body = TypeVar("Body", bound=BaseModel)
Made = TypeVar("Made")


class BodyBudget:
    """Bytes of all bodies that are held, of which there may be `limit`."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self.limit = limit
        self._tidying = False

    def tidy(self) -> None:
        """A large body is let go. It came in small pieces: unless asked to, the allocator may keep what they took."""
        if not self._tidying:
            self._tidying = True
            asyncio.get_running_loop().call_later(_TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._tidying = False
        tasks.in_daemon_thread(give_back)  # beside the event loop: it takes its time


class BodyLease:
    """Bytes of one body, until it is handed on."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, count: int) -> None:
        """Raises Exhausted where all bodies together are too large."""
        self.bytes += count
        self._budget.bytes += count
        if self._budget.bytes > self._budget.limit:
            raise Exhausted("requests hold too many bytes", reason="TOO_MANY_BYTES")

    def release(self) -> None:
        """Nothing of it is held any more."""
        if self.bytes >= _LARGE_BODY:
            self._budget.tidy()
        self._budget.bytes -= self.bytes
        self.bytes = 0


@dataclass(eq=False, slots=True)
class RequestContext:
    """One request under way. `metadata` is what goes along to the LLM service with it, `caller` who is let in."""

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
    """What a stream of this surface ends with that fails; the dialect says it where that is left out."""

    has_several: bool = False
    """Whether it has several prompts."""

    pause: float = math.inf
    last: float = math.inf
    """Seconds for which nothing may come of its answer; and when it is over at the latest, on the loop's clock."""

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
        """Something of the answer has come: it has time for more. Its timer is set anew now and then, since this comes
        with each token."""
        if self.cause is None and (until := self.limit.when()) is not None:
            wanted = min(self.last, asyncio.get_running_loop().time() + self.pause)
            if wanted - until > self.pause / 16:
                with suppress(RuntimeError):  # its time has just run out
                    self.limit.reschedule(wanted)

    async def read(self, kind: type[Body]) -> Body:
        """The body, as what it should be. Raises InvalidInput, which says what is wrong and where."""
        body, self.body = self.body, b""
        self.is_large = len(body) >= _SMALL_BODY
        return await self.made(_read, kind, body)

    async def made(self, make: Callable[..., Made], *args: Any) -> Made:
        """What is made of the body, which may have hundreds of thousands of parts."""
        return await tasks.to_thread(make, *args) if self.is_large else make(*args)


def _read(kind: type[Body], body: bytes) -> Body:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MOST_MARKS:
        raise TooLarge("the body has too many parts", reason="BODY_TOO_COMPLEX")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


def context_of(request: Request, surface: str) -> RequestContext:
    """The context of a request, which is counted as one of this surface from now on."""
    context: RequestContext = request.scope[SCOPE_KEY]
    context.surface = surface
    return context
