"""A request between the front and the engine: its events on the way to its caller, and what the next engine must know
of it where this one ends."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.errors import TwinlensError
from llm_service.engine.messages import (
    NOWHERE,
    Add,
    Complete,
    Pooled,
    Prefilled,
    PromptLogprobs,
    Resumed,
    Started,
    Token,
)

Event = Started | Prefilled | PromptLogprobs | Token | Complete | Pooled


class RowsHolder(Protocol):
    """Who has the rows of a request's items in the arena."""

    def rows_needed(self) -> None:
        """An engine needs places for all items after all, or again."""
        ...

    def rows_read(self) -> None:
        """An engine has read the rows of all items."""
        ...

    def released(self) -> None:
        """No engine reads the rows any more, nor will; called once."""
        ...


@dataclass(eq=False)
class EngineRequest:
    """`next` gives a request's events to its caller. It may be handed to another engine where the one that had it has
    ended."""

    add: Add
    """As the front first sent it; `message` is what the next engine is told."""
    holder: RowsHolder
    max_handovers: int
    """Ends of engines that it may be charged with and still go on; 0: it does not wait for another engine."""
    on_prompt_logprobs_taken: Callable[[EngineRequest, int], None]
    """Called when its caller comes back for more: he has the logprobs of the prompt's tokens before that one."""
    deaths: int = 0
    """Ends of engines that it is charged with."""
    held: bool = False
    """The engine that serves has it."""
    begun: bool = False
    """The engine that serves has begun on it."""
    waits_for_places: bool = False
    """No engine gets it before all items have places."""
    timer: asyncio.TimerHandle | None = None
    """Gives it up when it has waited for an engine for as long as it may."""
    caller_left: bool = False
    """Its caller wants nothing more of it: neither events nor places for its items."""
    _started: bool = False
    """Its caller has been given `Started`."""
    _with_logprobs: int = 0
    """Tokens of the prompt whose logprobs engines have given."""
    _given: int = 0
    """Of these, what its caller got with the last `next`; 0: no more than before."""
    _output: dict[int, array[int]] = field(default_factory=dict)
    """int32, by choice."""
    _came: dict[int, deque[float]] = field(default_factory=dict)
    """By choice, when steps had the tokens that `came` has not told of: `time.perf_counter`."""
    _finished: set[int] = field(default_factory=set)
    """Choices."""
    _places: list[tuple[int, int]] = field(default_factory=list)
    """Of each item: (offset in the row arena or NOWHERE, rows that have landed there)."""
    _events: deque[Event] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _error: TwinlensError | None = None

    def __post_init__(self) -> None:
        self._output = {choice: array("i") for choice in range(self.add.sampling.n)}
        self._came = {choice: deque() for choice in self._output}
        for given in self.add.resume:
            self._output[given.choice].frombytes(given.token_ids)
        self._finished = {given.choice for given in self.add.resume if given.finished}
        self._places = [(item.offset, item.landed) for item in self.add.items]

    @property
    def id(self) -> int:
        """The number that the front has given it."""
        return self.add.id

    @property
    def over(self) -> bool:
        """No engine has anything more to compute for it."""
        return self.caller_left or self._error is not None or len(self._finished) == len(self._output)

    # --- for its caller -------------------------------------------------------------------------------------------

    async def next(self) -> list[Event]:
        """The events since the last call, at least one; raises the error that ended the request."""
        given, self._given = self._given, 0
        if given:
            self.on_prompt_logprobs_taken(self, given)
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events = list(self._events)
        self._events.clear()
        if any(isinstance(event, PromptLogprobs) for event in events):
            self._given = self._with_logprobs
        return events

    def came(self, choice: int, count: int) -> list[float]:
        """When steps had so many tokens, the next ones that this was not said of yet."""
        times = self._came[choice]
        return [times.popleft() for _ in range(min(count, len(times)))]

    # --- what becomes of it ---------------------------------------------------------------------------------------

    def put(self, event: Event, at: float) -> None:
        """An engine has said this of it, of a token when a step had it; that it is started is passed on once."""
        match event:
            case Token(choice=choice, token=token, ended=ended):
                self._output[choice].append(token)
                self._came[choice].append(at)
                if ended:
                    self._finished.add(choice)
            case Complete(choice=choice):
                self._finished.add(choice)
            case Pooled():
                self._finished.add(0)
            case PromptLogprobs(first=first, logprobs=logprobs):
                self._with_logprobs = first + len(logprobs)
            case Started():
                self.begun = True
                if self._started:
                    return
                self._started = True
        self._events.append(event)
        self._news.set()

    def fail(self, error: TwinlensError) -> None:
        """Ends the request for its caller; events that came before are still given first."""
        self._error = self._error or error
        self._news.set()

    def leave(self, choice: int = -1) -> None:
        """Its caller wants nothing more of it, or of one choice."""
        if choice < 0:
            self.caller_left = True
        else:
            self._finished.add(choice)

    def land(self, item: int, rows: int) -> None:
        """The first `rows` rows of an item have landed; of an item without a place this means nothing."""
        offset, landed = self._places[item]
        if offset != NOWHERE:
            self._places[item] = offset, max(landed, rows)

    def rows_read(self) -> None:
        """The engine has read the rows of all items, which need no places; another engine may ask for some."""
        self._places = [(NOWHERE, 0)] * len(self._places)
        self.holder.rows_read()

    def rows_needed(self) -> None:
        """No item has a place any more. Until they have, no other engine gets the request: it would ask for places as
        well, and could be given those that are on their way for the first."""
        if self.caller_left:
            return
        self._places = [(NOWHERE, 0)] * len(self._places)
        self.waits_for_places = True
        self.holder.rows_needed()

    def ask_for_places(self) -> None:
        """Where an item has no place, all items are to have some before another engine gets the request."""
        if any(offset == NOWHERE for offset, _ in self._places):
            self.rows_needed()

    def place(self, places: list[tuple[int, int]]) -> None:
        """All items have places: (offset, rows that have landed there)."""
        self._places, self.waits_for_places = places, False

    def end_sessions(self, sessions: list[int]) -> None:
        """Where it belongs to one of these sessions, that is over."""
        if self.add.session in sessions:
            self.add = msgspec.structs.replace(self.add, session=0)

    def lose_engine(self) -> None:
        """The engine that had it is gone."""
        self.held = self.begun = False

    def message(self) -> Add:
        """The request for an engine, as far as it has come by now."""
        resume = [
            Resumed(choice, output.tobytes(), finished=choice in self._finished)
            for choice, output in self._output.items()
            if output or choice in self._finished
        ]
        items = [
            msgspec.structs.replace(item, offset=offset, landed=landed)
            for item, (offset, landed) in zip(self.add.items, self._places, strict=True)
        ]
        return msgspec.structs.replace(self.add, resume=resume, items=items, with_logprobs=self._with_logprobs)
