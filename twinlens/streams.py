"""A stream of events as Python iterates it, for threads and for an event loop.

A stream owns its call: leaving its `with` block, or `cancel()`, ends the call, and the service then stops its
work. A stream that is read to its end, or to an error, has ended by itself.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from twinlens.errors import FailedCall, error_from

Event = TypeVar("Event", bound=Message)
Event_co = TypeVar("Event_co", bound=Message, covariant=True)


class _Call(Protocol[Event_co]):
    """What gRPC returns for a stream read by a thread; it exports no type of that kind."""

    def __next__(self) -> Event_co: ...

    def cancel(self) -> bool: ...


class Stream(Generic[Event]):
    """Events for a thread: `for event in stream`. Raises TwinlensError when the call fails."""

    def __init__(self, call: _Call[Event]) -> None:
        self._call = call
        self._cancelled = False
        self._events = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        try:
            event = next(self._call)
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            raise error_from(cast(FailedCall, error), self._events) from None
        self._events += 1
        return event

    def cancel(self) -> None:
        """Ends the call; iteration stops. Harmless once it has ended."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncStream(Generic[Event]):
    """Events for an event loop: `async for event in stream`. Raises TwinlensError when the call fails."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Event]) -> None:
        self._call = call
        self._cancelled = False
        self._events = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from(error, self._events) from None
        except asyncio.CancelledError:
            if self._cancelled and not _task_is_cancelled():
                raise StopAsyncIteration from None  # cancel() ended the call, not the task that reads it
            raise
        if event is grpc.aio.EOF:
            raise StopAsyncIteration
        self._events += 1
        return cast(Event, event)

    def cancel(self) -> None:
        """Ends the call; iteration stops. Harmless once it has ended."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
