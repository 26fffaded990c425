"""A request between the front and the engine: its events on the way to the caller, and what the next engine must know
if this one ends."""

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
    """Owns the rows of a request's items in the arena."""

    def rows_needed(self) -> None:
        """An engine needs places for all items after all, or again."""
        ...

    def rows_read(self) -> None:
        """An engine has read the rows of all items."""
        ...

    def released(self) -> None:
        """No engine reads the rows any more, or will; called once."""
        ...


@dataclass(eq=False)
class EngineRequest:
    """`next` returns a request's events to its caller. If its engine ends, the request may go to another one."""

    add: Add
    """The message of the first submission, except for its items, which are as they are now; `message` is what the next
    engine gets."""
    holder: RowsHolder
    max_handovers: int
    """Ends of engines that it may be charged with and still go on; 0: it does not wait for another engine."""
    on_prompt_logprobs_taken: Callable[[EngineRequest, int], None]
    """Called when its caller comes back for more: he has the logprobs of the prompt's tokens before that one."""
    stream_interval: int = 1
    """Tokens of a choice that wait until its caller is given them together; the first and the last do not wait."""
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
    """The caller needs nothing more."""
    _started: bool = False
    """Its caller has been given `Started`."""
    _with_logprobs: int = 0
    """Prompt tokens whose logprobs engines have sent."""
    _given: int = 0
    """How many of these the caller got with the last `next`; 0: no more than before."""
    _output: dict[int, array[int]] = field(default_factory=dict)
    """int32, by choice."""
    _times: dict[int, deque[float]] = field(default_factory=dict)
    """By choice, when steps had the tokens whose times were not taken: `time.perf_counter`."""
    _finished: set[int] = field(default_factory=set)
    """Choices."""
    _waiting: dict[int, int] = field(default_factory=dict)
    """By choice that has had its first token: those that its caller has not been given."""
    _events: deque[Event] = field(default_factory=deque)
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    """Its caller is to be given the events, or the error."""
    _error: TwinlensError | None = None

    def __post_init__(self) -> None:
        self._output = {choice: array("i") for choice in range(self.add.sampling.n)}
        self._times = {choice: deque() for choice in self._output}
        for given in self.add.resume:
            self._output[given.choice].frombytes(given.token_ids)
        self._finished = {given.choice for given in self.add.resume if given.finished}

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
        """The events since the last call, at least one; raises the error that ended the request. If they are tokens
        alone, there are `stream_interval` of one choice, or its first or last is among them."""
        given, self._given = self._given, 0
        if given:
            self.on_prompt_logprobs_taken(self, given)
        await self._due.wait()
        if self._error is None:
            self._due.clear()
        elif not self._events:
            raise self._error
        events = list(self._events)
        self._events.clear()
        self._waiting = dict.fromkeys(self._waiting, 0)
        if any(isinstance(event, PromptLogprobs) for event in events):
            self._given = self._with_logprobs
        return events

    def take_times(self, choice: int, count: int) -> list[float]:
        """The times at which steps had the next `count` tokens of a choice, each taken once."""
        times = self._times[choice]
        return [times.popleft() for _ in range(min(count, len(times)))]

    # --- what becomes of it ---------------------------------------------------------------------------------------

    def put(self, event: Event, at: float) -> None:
        """Takes an event of the engine; `at` is when a step had the token. A second `Started` is dropped."""
        match event:
            case Token(choice=choice, token=token, ended=ended):
                self._output[choice].append(token)
                self._times[choice].append(at)
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
        if self._completes_interval(event):
            self._due.set()

    def _completes_interval(self, event: Event) -> bool:
        if self.stream_interval == 1 or not isinstance(event, Token):
            return True
        self._waiting[event.choice] = waiting = self._waiting.get(event.choice, self.stream_interval - 1) + 1
        return waiting >= self.stream_interval or bool(event.ended)

    def fail(self, error: TwinlensError) -> None:
        """Ends the request for its caller; events that came before are still given first."""
        self._error = self._error or error
        self._due.set()

    def leave(self, choice: int = -1) -> None:
        """The caller needs nothing more of the request, or of one choice."""
        if choice < 0:
            self.caller_left = True
        else:
            self._finished.add(choice)

    def land(self, item: int, rows: int) -> None:
        """The first `rows` rows of an item have landed."""
        self.add.items[item].land(rows)

    def rows_read(self) -> None:
        """The engine has read the rows of all items, which need no places now; another engine may need them again."""
        self._displace()
        self.holder.rows_read()

    def rows_needed(self) -> None:
        """No item has a place any more. Until they have places, no other engine gets the request: it would ask for them
        as well, and could be given places meant for the first engine."""
        if self.over:
            return
        self._displace()
        self.waits_for_places = True
        self.holder.rows_needed()

    def ask_for_places(self) -> None:
        """If an item has no place, all items need places before another engine gets the request."""
        if any(item.offset == NOWHERE for item in self.add.items):
            self.rows_needed()

    def place(self, places: list[tuple[int, int]]) -> None:
        """All items have places: (offset, rows that have arrived there)."""
        for item, (offset, rows) in zip(self.add.items, places, strict=True):
            item.place(offset, rows)
        self.waits_for_places = False

    def _displace(self) -> None:
        for item in self.add.items:
            item.displace()

    def end_sessions(self, sessions: list[int]) -> None:
        """Detaches the request from its session, if it is one of these."""
        if self.add.session in sessions:
            self.add = msgspec.structs.replace(self.add, session=0)

    def lose_engine(self) -> None:
        """The engine that had it is gone. Its tokens do not wait for those of the next."""
        self.held = self.begun = False
        if self._events:
            self._due.set()

    def message(self) -> Add:
        """The request for an engine, as far as it has come by now."""
        resume = [
            Resumed(choice, output.tobytes(), finished=choice in self._finished)
            for choice, output in self._output.items()
            if output or choice in self._finished
        ]
        return msgspec.structs.replace(self.add, resume=resume, with_logprobs=self._with_logprobs)
