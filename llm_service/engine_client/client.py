"""The front's side of the engine process: starts it, talks to it, and restarts it when it dies. Every request ends
exactly once: with its last token, an error, or silently after its caller has left; the death of an engine alone ends
none (`handover`). What a request holds outside the engine is released when no engine reads it any more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from common.aio import tasks
from common.checkpoints.checkpoint import CheckpointError
from common.errors import Internal, TwinlensError, Unavailable, from_code
from common.process.children import Child, ChildDied
from common.shm.arena import SharedBuffer
from common.telemetry import log
from llm_service.engine.messages import (
    Abort,
    AdapterRead,
    Add,
    Beat,
    BlockEvent,
    BlocksAnswer,
    BlocksChanged,
    BlocksCleared,
    Complete,
    Defect,
    DropAdapter,
    EndSessions,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    GetState,
    Landed,
    LoadAdapter,
    Pooled,
    Prefilled,
    Prefills,
    PromptLogprobs,
    PromptLogprobsTaken,
    PullEnded,
    Ready,
    Released,
    RowsNeeded,
    RowsPlaced,
    RowsRead,
    Started,
    State,
    Token,
    Tokens,
    Unable,
)
from llm_service.engine_client.adapter_orders import AdapterOrders
from llm_service.engine_client.block_places import BlockPlaces, BlocksMessage
from llm_service.engine_client.engine_request import EngineRequest, Event, RowsHolder
from llm_service.engine_client.handover import Handover, engine_lost
from llm_service.engine_client.mirrors import Mirrors
from llm_service.engine_client.processes import MODULE, SpareEngine, Watch
from llm_service.settings import EngineSettings
from llm_service.worker.messages import MirrorOrder

_log = log.get("engine")
_RESTART_SECONDS = 0.2
"""Delay of the next start after a failed one; an engine that served is replaced at once."""
_ADAPTER_SECONDS = 1.0
"""Delay before an adapter is loaded again that an engine had no threads or memory for."""


class EngineClient:
    """One engine process that runs `module`, and a spare one with `spare_engine`.

    An engine that does not serve within `start_seconds`, or takes more than `step_seconds` for a step, is killed.
    `on_ready` is called whenever it becomes able or unable to serve. `latest` is its last report of queues and
    counters, once a second; `compiling` is true while torch computes because kernels are being compiled. Requests wait
    at most `handover_seconds` for the next engine. `on_adapter_lost` gets the number of an adapter that a new engine
    cannot load. Callers are given `stream_interval` tokens of a choice at a time. `kv_host` is the memory that the
    settings pass as a descriptor; `blocks` exchanges KV blocks there.
    """

    def __init__(
        self,
        settings: EngineSettings,
        arena_fd: int,
        on_ready: Callable[[bool], None],
        *,
        start_seconds: float,
        step_seconds: float,
        handover_seconds: float = 0.0,
        spare_engine: bool = False,
        stream_interval: int = 1,
        module: str = MODULE,
        kv_host: SharedBuffer | None = None,
    ) -> None:
        self._settings = settings
        self.blocks: BlockPlaces | None = None
        if kv_host is not None:
            ranks, rank_bytes = settings.tensor_parallel, settings.kv_host_bytes
            self.blocks = BlockPlaces(kv_host, ranks, rank_bytes, self._exchange)
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._stream_interval = stream_interval
        fds = [arena_fd, *([kv_host.fd] if kv_host is not None else [])]
        self._spare = SpareEngine(*fds, wanted=spare_engine, module=module)
        self._on_ready = on_ready
        self._child: Child[FromEngine] | None = None
        self._defect: dict[str, str] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._handover = Handover(handover_seconds, 1 + settings.speculative_tokens)
        self._answers: dict[type, deque[asyncio.Future[FromEngine]]] = {State: deque(), Flushed: deque()}
        self._ids = 0
        self._first: asyncio.Future[Ready] | None = None
        self.ready: Ready | None = None
        self.latest = State()
        self.compiling, self.late_compiles = False, 0
        self.mirrors = Mirrors(self._order)
        self._adapters = AdapterOrders()
        self._loaded: Ready | None = None
        self.deaths = 0
        """Engines that have ended by themselves, or were given up, since the start."""
        self.on_adapter_lost: Callable[[int], None] = lambda _: None
        self.on_blocks: Callable[[list[BlockEvent]], None] = lambda _: None
        """Gets the changes of the blocks that prompts can find, if the settings ask for them."""

    async def start(self) -> Ready:
        """Starts the engine and waits until it can serve.

        Raises CheckpointError if it cannot serve the checkpoint, Internal if it ends for another reason.
        """
        self._first = asyncio.get_running_loop().create_future()
        self._keeper = tasks.start_vital(self._keep(), "engine keeper")
        return await self._first

    def _fail_start(self, error: TwinlensError | CheckpointError) -> bool:
        """Ends `start` with this error, if it still waits; whether it did."""
        if self._first is None or self._first.done():
            return False
        self._first.set_exception(error)
        return True

    async def stop(self) -> None:
        """Stops the engine; pending calls raise Unavailable."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._handover.close()
        await self._spare.stop()

    @property
    def requests(self) -> int:
        """Requests that the engine has not let go of."""
        return self._handover.held

    @property
    def handed_over(self) -> int:
        """Times that a request was handed to an engine after another one had ended under it."""
        return self._handover.handed_over

    @property
    def speculative_method(self) -> str:
        """The source of drafts; empty if there are none."""
        return self._settings.speculative_method

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._settings.block_size

    @property
    def max_loras(self) -> int:
        """Slots for adapters."""
        return self._settings.max_loras

    @property
    def reusable_block_size(self) -> int | None:
        """Tokens of a block if the engine reuses computed blocks; None if it does not, or is down."""
        return self.block_size if self.ready is not None and self.ready.prefix_caching else None

    def next_id(self) -> int:
        """A number for a new request."""
        self._ids += 1
        return self._ids

    def check(self, max_handovers: int) -> None:
        """Raises Unavailable if `submit` would: for callers that do work for a request before they submit it."""
        self._handover.check(max_handovers)

    def submit(self, add: Add, holder: RowsHolder, max_handovers: int = 0) -> EngineRequest:
        """Submits a request, or queues it if an engine has just ended. It may outlive `max_handovers` engines. Raises
        Unavailable, without calling `holder`, if no engine is available and the request does not wait for one, or if
        its adapter is lost."""
        if add.adapter and not self._adapters.keeps(add.adapter):
            raise _adapter_lost()
        request = EngineRequest(add, holder, max_handovers, self._prompt_logprobs_taken, self._stream_interval)
        self._handover.enter(request)
        self._send_waiting()
        return request

    def _send_waiting(self) -> None:
        """Sends the queued requests that may go to the engine now."""
        for request in self._handover.sendable():
            self._require().send(request.message())

    def landed(self, id: int, item: int, rows: int) -> None:
        """Passes on how many rows of an item have landed."""
        if request := self._handover.get(id):
            request.land(item, rows)
            self._send_about(request, Landed(id, item, rows))

    def placed(self, id: int, places: list[tuple[int, int]]) -> None:
        """Tells the engine the places of a request's items, which it asked for: (offset, rows that have arrived
        there)."""
        if request := self._handover.get(id):
            request.place(places)
            self._send_about(request, RowsPlaced(id, places))
            self._send_waiting()

    def abort(self, id: int, choice: int = -1) -> None:
        """Ends a request or one of its choices; unknown ids are ignored."""
        if request := self._handover.get(id):
            request.leave(choice)
            self._send_about(request, Abort(id, choice))
            if request.over and not request.held:
                self._let_go(id)

    def _prompt_logprobs_taken(self, request: EngineRequest, before: int) -> None:
        self._send_about(request, PromptLogprobsTaken(request.id, before))

    def _send_about(self, request: EngineRequest, message: Landed | RowsPlaced | PromptLogprobsTaken | Abort) -> None:
        if request.held and self._child is not None:
            self._child.send(message)

    def end_sessions(self, sessions: list[int]) -> None:
        """Says that these sessions are over."""
        if sessions:
            for request in self._handover:
                request.end_sessions(sessions)
        if sessions and self._child is not None:
            self._child.send(EndSessions(sessions))

    async def load_adapter(self, path: str) -> AdapterRead:
        """Loads an adapter from a folder into this engine and each later one. Raises Unavailable while the engine is
        down, or if it ends meanwhile."""
        child = self._require()
        message, answer = self._adapters.load(path)
        child.send(message)
        return await answer

    def drop_adapter(self, number: int) -> None:
        """Drops an adapter that no request uses any more."""
        message = self._adapters.drop(number)
        if self._child is not None:
            self._child.send(message)

    def _exchange(self, message: BlocksMessage) -> None:
        self._require().send(message)

    def _order(self, order: MirrorOrder) -> None:
        if self._child is not None:
            self._child.send(order)

    async def state(self) -> State:
        """The engine's queues and counters; raises Unavailable while it is down."""
        answer = await self._ask(GetState(), State)
        assert isinstance(answer, State)
        return answer

    async def flush(self) -> int:
        """Forgets cached KV blocks; how many."""
        answer = await self._ask(Flush(), Flushed)
        assert isinstance(answer, Flushed)
        return answer.blocks

    async def _ask(self, question: GetState | Flush, kind: type) -> FromEngine:
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
                child = await self._spare.take()
            except OSError as error:  # a moment without memory, or descriptors, for one more process
                _log.error("no process could be started for the engine", cause=error.strerror)
            else:
                served = await self._live(child)
            self._fail_start(Internal("the engine could not start"))
            if self._first is not None and self._first.exception() is not None:
                return
            await asyncio.sleep(0 if served else _RESTART_SECONDS)

    async def _live(self, child: Child[FromEngine]) -> bool:
        """One engine's life, to its end; whether it has served."""
        self._child, self._defect, served = child, {}, False
        try:
            child.send(self._settings)
            async with Watch(child.process.pid, self._start_seconds, self._step_seconds) as watch:
                while True:
                    self._take(message := await child.receive())
                    served = self.ready is not None
                    watch.heard(serves=served, busy=message.busy_seconds if isinstance(message, Beat) else 0.0)
        except ChildDied as error:
            self.deaths += 1
            _log.error("the engine has ended", cause=str(error))
            self._lose_all()
            if found := self._defect | await child.post_mortem():
                _log.error("post-mortem of the engine", **found)
            status = f" ({found['status']})" if "status" in found else ""
            self._fail_start(Internal(f"the engine could not start: {error}{status}"))
        finally:
            await child.stop()
            self._lose_all()
        return served

    def _lose_all(self) -> None:
        self._child, was_ready, self.ready = None, self.ready is not None, None
        if self._loaded is not None:
            self.on_blocks([BlocksCleared()])
        self._loaded = None
        self._adapters.engine_ended(engine_lost())
        self.latest, self.compiling, self.late_compiles = State(), False, 0
        if was_ready:
            self._on_ready(False)
            if requests := self._handover.engine_ended():
                _log.warning("requests wait for the next engine", requests=requests)
        self.mirrors.lost()
        if self.blocks is not None:
            self.blocks.lost()
        for waiting in self._answers.values():
            while waiting:
                if not (answer := waiting.popleft()).done():
                    answer.set_exception(engine_lost())

    def _let_go(self, id: int) -> None:
        if self._handover.let_go(id):
            self._send_waiting()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Tokens(tokens, at):
                self._tell_each(tokens, at)
            case Prefills(chunks):
                self._tell_each(chunks)
            case Started(id) | PromptLogprobs(id) | Pooled(id) | Complete(id):
                self._tell(id, message)
            case Failed(id, code, reason, text, field):
                if request := self._handover.get(id):
                    request.fail(from_code(code, text, reason=reason, field=field))
            case RowsRead() | RowsNeeded():
                self._take_rows(message)
            case Released(ids):
                for id in ids:
                    self._let_go(id)
            case State() | Flushed():
                if not (answer := self._answers[type(message)].popleft()).done():
                    answer.set_result(message)
            case BlocksChanged() | BlocksAnswer():
                self._take_blocks(message)
            case Beat(state):
                self.latest, self.compiling, self.late_compiles = state, message.compiling, message.late_compiles
            case Defect(what):
                self._defect = {"defect": what}
            case Ready() | Unable() | PullEnded() | AdapterRead():
                self._take_news(message)

    def _tell_each(self, events: Iterable[Token | Prefilled], at: float = 0.0) -> None:
        for event in events:
            self._tell(event.id, event, at)

    def _tell(self, id: int, event: Event, at: float = 0.0) -> None:
        if (request := self._handover.get(id)) and self._handover.deliver(request, event, at):
            self._send_waiting()

    def _take_rows(self, message: RowsRead | RowsNeeded) -> None:
        if isinstance(message, RowsRead):
            for request in filter(None, map(self._handover.get, message.ids)):
                request.rows_read()
        elif needs := self._handover.get(message.id):
            needs.rows_needed()

    def _take_blocks(self, message: BlocksChanged | BlocksAnswer) -> None:
        if isinstance(message, BlocksChanged):
            self.on_blocks(message.events)
        elif self.blocks is not None:
            self.blocks.take(message)

    def _take_news(self, message: Ready | Unable | PullEnded | AdapterRead) -> None:
        """Handles messages that are not about one request: readiness, and results of mirror and adapter orders."""
        if isinstance(message, PullEnded):
            self.mirrors.ended(message)
            return
        if isinstance(message, AdapterRead):
            self._take_adapter(message)
            return
        if isinstance(message, Ready):
            assert self._child is not None
            self._loaded = message
            self.on_blocks([BlocksCleared()])  # listeners may know blocks of a service that was here before
            for order in self._adapters.again():
                self._child.send(order)
            self._begin_serving()
        elif not self._fail_start(CheckpointError(message.why)):
            _log.error("the engine can no longer serve", cause=message.why)

    def _take_adapter(self, message: AdapterRead) -> None:
        assert self._child is not None
        if (order := self._adapters.once_more(message)) is not None:
            _log.warning("an adapter cannot be read now", cause=message.error)
            asyncio.get_running_loop().call_later(_ADAPTER_SECONDS, self._tell_again, self._child, order)
            return
        if not self._adapters.take(message):
            _log.error("an adapter is lost", cause=message.error)
            for request in self._handover:
                if request.add.adapter == message.id:
                    self._handover.give_up(request, _adapter_lost())
            self.on_adapter_lost(message.id)
        elif not message.error and not self._adapters.keeps(message.id):
            self._child.send(DropAdapter(message.id))  # it was let go of meanwhile
        self._begin_serving()

    def _tell_again(self, child: Child[FromEngine], order: LoadAdapter) -> None:
        if self._child is child:  # else the next engine is told anyway
            child.send(order)

    def _begin_serving(self) -> None:
        """Once the model is loaded, and the adapters that the engine before had."""
        if self.ready is not None or self._loaded is None or not self._adapters.complete:
            return
        self.ready = self._loaded
        self._handover.engine_serves()
        self._spare.prepare()
        self.mirrors.opened(self.ready.reachable)
        if self.blocks is not None:
            self.blocks.opened(self.ready.place_bytes)
        if self._first is not None and not self._first.done():
            self._first.set_result(self.ready)
        self._on_ready(True)
        self._send_waiting()


def _adapter_lost() -> Unavailable:
    return Unavailable("the adapter is lost", reason="ADAPTER_LOST")
