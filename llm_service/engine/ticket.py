"""One request's way through the engine, as its front sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import TwinlensError
from llm_service.engine.messages import Prefilled, Scored, Started, Token

Event = Started | Prefilled | Scored | Token


@dataclass(eq=False)
class Ticket:
    """A request in the engine: `next` gives its events; `on_released` is called once, when the engine lets go of it,
    `on_rows_needed` when it needs places for items after all."""

    id: int
    on_released: Callable[[], None]
    on_rows_needed: Callable[[], None] | None = None
    _events: deque[Event] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _error: TwinlensError | None = None

    async def next(self) -> list[Event]:
        """The events since the last call, at least one; raises the error that ended the request."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events = list(self._events)
        self._events.clear()
        return events

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def fail(self, error: TwinlensError) -> None:
        """Ends the request for its caller; events that came before are still given first."""
        self._error = self._error or error
        self._news.set()
