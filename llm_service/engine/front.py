"""The front's side of the engine process: starts it, talks to it, starts it again when it dies.

Every request gets its end exactly once: its last token, an error, or nothing more after the caller has left. What it
holds outside the engine is given back when the engine says that it no longer reads it, or is dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common import log, tasks
from common.checkpoint import CheckpointError
from common.errors import Internal, TwinlensError, Unavailable, from_code
from common.processes import Child, ChildDied
from llm_service.engine.keeper import MODULE, Reserve, Watch
from llm_service.engine.messages import (
    Abort,
    Add,
    Beat,
    EndSessions,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    Inspect,
    Landed,
    Prefilled,
    Prefills,
    PullEnded,
    Ready,
    Released,
    RowsNeeded,
    RowsPlaced,
    Scored,
    Started,
    State,
    Token,
    Tokens,
    Unable,
)
from llm_service.engine.mirrors import Mirrors
from llm_service.plan import MirrorOrder
from llm_service.settings import EngineSettings

_log = log.get("engine")
_RESTART_SECONDS = 0.2
"""Before the next start, where the last one has come to nothing: an engine that served is replaced at once."""


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


class EngineFront:
    """One engine process that runs `module`, and another in reserve with `standby`.

    One that does not serve within `start_seconds`, or takes more than `step_seconds` for a step, is ended. `on_ready`
    is told whenever it becomes able, or unable, to serve; `latest` is what it last said of its queues and counters by
    itself, once a second, and `compiling` whether torch computes while its kernels are compiled.
    """

    def __init__(
        self,
        settings: EngineSettings,
        arena_fd: int,
        on_ready: Callable[[bool], None],
        *,
        start_seconds: float,
        step_seconds: float,
        standby: bool = False,
        module: str = MODULE,
    ) -> None:
        self._settings = settings
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._reserve = Reserve(arena_fd, ahead=standby, module=module)
        self._on_ready = on_ready
        self._child: Child[FromEngine] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tickets: dict[int, Ticket] = {}
        self._answers: dict[type, deque[asyncio.Future[FromEngine]]] = {State: deque(), Flushed: deque()}
        self._ids = 0
        self._first: asyncio.Future[Ready] | None = None
        self.ready: Ready | None = None
        self.latest = State()
        self.compiling = False
        self.mirrors = Mirrors(self._order)

    async def start(self) -> Ready:
        """Starts the engine and waits until it can serve.

        Raises CheckpointError where it cannot serve the checkpoint, Internal where it ends for another reason.
        """
        self._first = asyncio.get_running_loop().create_future()
        self._keeper = tasks.start(self._keep(), "engine keeper")
        return await self._first

    async def stop(self) -> None:
        """Ends the engine; whoever still waits gets Unavailable."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._reserve.stop()

    @property
    def requests(self) -> int:
        """Requests that the engine has not let go of."""
        return len(self._tickets)

    @property
    def prefix_block(self) -> int:
        """Tokens of a block, where the engine uses computed ones again; 0 where it does not, or is down."""
        return 0 if self.ready is None else self.ready.prefix_block

    def next_id(self) -> int:
        """A number for a new request."""
        self._ids += 1
        return self._ids

    def submit(self, add: Add, on_released: Callable[[], None]) -> Ticket:
        """Hands a request over. Raises Unavailable, without calling `on_released`, while the engine is down."""
        child = self._require()
        ticket = self._tickets[add.id] = Ticket(add.id, on_released)
        child.send(add)
        return ticket

    def landed(self, id: int, item: int, rows: int) -> None:
        """Passes on how many rows of an item have landed."""
        if id in self._tickets and self._child is not None:
            self._child.send(Landed(id, item, rows))

    def placed(self, id: int, places: list[tuple[int, int]]) -> None:
        """Gives all items of a request their places, which it has asked for: (offset, rows that have landed there)."""
        if id in self._tickets and self._child is not None:
            self._child.send(RowsPlaced(id, places))

    def abort(self, id: int, choice: int = -1) -> None:
        """Ends a request or one of its choices; what is unknown is skipped."""
        if id in self._tickets and self._child is not None:
            self._child.send(Abort(id, choice))

    def end_sessions(self, sessions: list[int]) -> None:
        """Says that these sessions are over."""
        if sessions and self._child is not None:
            self._child.send(EndSessions(sessions))

    def _order(self, order: MirrorOrder) -> None:
        if self._child is not None:
            self._child.send(order)

    async def state(self) -> State:
        """The engine's queues and counters; raises Unavailable while it is down."""
        answer = await self._ask(Inspect(), State)
        assert isinstance(answer, State)
        return answer

    async def flush(self) -> int:
        """Forgets cached KV blocks; how many."""
        answer = await self._ask(Flush(), Flushed)
        assert isinstance(answer, Flushed)
        return answer.blocks

    async def _ask(self, question: Inspect | Flush, kind: type) -> FromEngine:
        child = self._require()
        answer: asyncio.Future[FromEngine] = asyncio.get_running_loop().create_future()
        self._answers[kind].append(answer)
        child.send(question)
        return await answer

    def _require(self) -> Child[FromEngine]:
        if self.ready is None or self._child is None:
            raise Unavailable("the engine is starting", reason="ENGINE_UNAVAILABLE")
        return self._child

    async def _keep(self) -> None:
        """Runs one engine after the other, until cancelled, or until the first one fails to start."""
        while True:
            served = False
            try:
                child = await self._reserve.take()
            except OSError as error:  # a moment without memory, or descriptors, for one more process
                _log.error("no process could be had for the engine", cause=error.strerror)
            else:
                served = await self._live(child)
            if self._first is not None and not self._first.done():
                self._first.set_exception(Internal("the engine could not start"))
            if self._first is not None and self._first.exception() is not None:
                return
            await asyncio.sleep(0 if served else _RESTART_SECONDS)

    async def _live(self, child: Child[FromEngine]) -> bool:
        """One engine's life, to its end; whether it has served."""
        self._child, served = child, False
        try:
            child.send(self._settings)
            async with Watch(child.process.pid, self._start_seconds, self._step_seconds) as watch:
                while True:
                    self._take(message := await child.receive())
                    served = self.ready is not None
                    watch.heard(serves=served, busy=message.busy_seconds if isinstance(message, Beat) else 0.0)
        except ChildDied as error:
            _log.error("the engine has ended", cause=str(error))
            if self._first is not None and not self._first.done():
                self._first.set_exception(Internal(f"the engine could not start: {error}"))
            child.kill()
            self._lose_all()
        finally:
            await child.stop()
            self._lose_all()
        return served

    def _lose_all(self) -> None:
        self._child, was_ready, self.ready = None, self.ready is not None, None
        self.latest, self.compiling = State(), False
        if was_ready:
            self._on_ready(False)
        error = Unavailable("the engine has ended and is being restarted", reason="ENGINE_UNAVAILABLE")
        for ticket in list(self._tickets.values()):
            ticket.fail(error)
            self._let_go(ticket.id)
        self.mirrors.lost()
        for waiting in self._answers.values():
            while waiting:
                if not (answer := waiting.popleft()).done():
                    answer.set_exception(error)

    def _let_go(self, id: int) -> None:
        if (ticket := self._tickets.pop(id, None)) is not None:
            ticket.on_released()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Tokens(events) | Prefills(events):
                for event in events:
                    self._tell(event.id, event)
            case Started(id) | Scored(id):
                self._tell(id, message)
            case Failed(id, code, reason, text, field):
                if ticket := self._tickets.get(id):
                    ticket.fail(from_code(code, text, reason=reason, field=field))
            case RowsNeeded(id):
                if (ticket := self._tickets.get(id)) and ticket.on_rows_needed is not None:
                    ticket.on_rows_needed()
            case Released(ids):
                for id in ids:
                    self._let_go(id)
            case State() | Flushed():
                if not (answer := self._answers[type(message)].popleft()).done():
                    answer.set_result(message)
            case Beat(state):
                self.latest, self.compiling = state, message.compiling
            case Ready() | Unable() | PullEnded():
                self._take_news(message)

    def _tell(self, id: int, event: Event) -> None:
        if ticket := self._tickets.get(id):
            ticket.put(event)

    def _take_news(self, message: Ready | Unable | PullEnded) -> None:
        """Whether the engine can serve; what came of an order for the mirrors."""
        if isinstance(message, PullEnded):
            self.mirrors.ended(message)
            return
        first = self._first if self._first is not None and not self._first.done() else None
        if isinstance(message, Ready):
            self.ready = message
            self._reserve.prepare()
            self.mirrors.opened(message.reachable)
            if first is not None:
                first.set_result(message)
            self._on_ready(True)
        elif first is not None:
            first.set_exception(CheckpointError(message.why))
        else:
            _log.error("the engine cannot serve any more", cause=message.why)
