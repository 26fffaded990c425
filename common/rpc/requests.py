"""The messages of one call, read within the budget of requests, and looked at before a handler sees them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError

from common.errors import InvalidInput
from common.rpc.request_budget import STATED, Ends, RequestBudget
from common.rpc.status import Context

MAX_ID = 128
"""Characters of the longest request id."""

_MAX_FOREIGN_BYTES = 64 << 10
"""Of a message to health checks and reflection."""

_CANCEL_SECONDS = 0.1
"""Seconds within which gRPC cancels the handler of a caller who has left, after it has reported that no message
comes."""

Deserializer = Callable[[bytes], Any]


class CallReader:
    """The requests of one call. Their bytes count towards the budget until `release`."""

    def __init__(self, call: Ends, context: Context, deserialize: Deserializer, budget: RequestBudget) -> None:
        self._call = call
        self._context = context
        self._deserialize = deserialize
        self._budget = budget
        self._held = 0

    async def named(self) -> NamedRequest:
        """The one request of a method of ours. Raises InvalidInput for one that cannot be read."""
        return NamedRequest(self._parsed(await self._body()))

    async def foreign(self) -> Any:
        """The single request of a foreign method. Raises InvalidInput if it is long: reflection echoes it."""
        return self._short(await self._body())

    async def stream(self) -> AsyncIterator[Any]:
        """The requests of a foreign method, each released before the next."""
        while (body := await self._body()) is not None:
            yield self._short(body)
            self.release()

    def release(self) -> None:
        """The call has released what it has read."""
        self._budget.release(self._held)
        self._held = 0

    async def _body(self) -> bytes | None:
        """The next message, within the budget; None if there is none."""
        metadata = dict(self._context.invocation_metadata() or ())
        stated = str(metadata.get(STATED, ""))
        size = int(stated) if stated.isdecimal() else 0
        async with self._budget.arrival(self._context.peer(), self._call, size) as arrived:
            body = await self._context.read()
            if not isinstance(body, bytes):  # gRPC's mark of the end; of a caller who left, it says so a moment later
                await asyncio.sleep(_CANCEL_SECONDS)
                return None
            self._held += len(body)
            arrived(len(body))
            return body

    def _short(self, body: bytes | None) -> Any:
        if body is not None and len(body) > _MAX_FOREIGN_BYTES:
            raise InvalidInput("the message is too long for its method", reason="MESSAGE_TOO_LONG")
        return self._parsed(body)

    def _parsed(self, body: bytes | None) -> Any:
        # gRPC's own message for invalid bytes would name a class.
        try:
            message = None if body is None else self._deserialize(body)
        except DecodeError:
            message = None
        if message is None:
            raise InvalidInput("the message cannot be read", reason="MALFORMED_MESSAGE") from None
        return message


class NamedRequest:
    """A request and its id. The taker is its only holder, and decides when to release its bytes."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.id = _request_id(message)
        for field in ("request_id", "cache_salt", "session_id"):
            if len(getattr(message, field, "")) > MAX_ID:
                text = f"{field} is longer than {MAX_ID} characters"
                raise InvalidInput(text, reason="ID_TOO_LONG", field=field)

    def take(self) -> Any:
        """The message; once."""
        message, self._message = self._message, None
        return message


def _request_id(request: Any) -> str:
    """The request's id; if it has the field and left it empty, one is made up and written into it."""
    if not hasattr(request, "request_id"):
        return ""
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return str(request.request_id)[:MAX_ID]
