"""The engine's loop: take in messages, plan a step, take in the result of one. No event loop."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from common.aio.tasks import in_daemon_thread
from common.process.parent_link import ParentLink
from common.telemetry import log
from llm_service.engine.batch import Step
from llm_service.engine.block_events import BlockEvents
from llm_service.engine.block_exchange import BlockExchange
from llm_service.engine.messages import (
    Abort,
    AdapterRead,
    Add,
    AwaitBlocks,
    BlocksArrived,
    BlocksChanged,
    BlocksRead,
    DropAdapter,
    EndSessions,
    FindBlocks,
    Flush,
    Flushed,
    FromEngine,
    GetState,
    Landed,
    LendBlocks,
    LoadAdapter,
    Prefilled,
    Prefills,
    PromptLogprobsTaken,
    PullEnded,
    Released,
    RowsPlaced,
    RowsRead,
    ToEngine,
    Tokens,
)
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.sequence import Sequence
from llm_service.engine.step_queue import StepQueue
from llm_service.model_config.adapter_folder import Adapter, AdapterError
from llm_service.plan import StepMemoryError, StepResult
from llm_service.worker.messages import (
    AddAdapter,
    InvalidateRows,
    MirrorOrder,
    Pulled,
    PullRows,
    RemoveAdapter,
    UnmapPool,
)

_log = log.get("engine")
_PROOF_SECONDS = 5.0
"""Seconds between integrity checks, which visit every block and take milliseconds for a large cache."""

ReadAdapter = Callable[[str], Adapter]

_LONGEST_REST = 3600.0
"""Seconds; deadlines may be millennia away, and the operating system cannot wait that long."""


class Wake:
    """Ends the engine's wait for messages from another thread of its process: a flag that `select` can wait for,
    `set` by any thread, cleared by the one that waits."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while the flag is set."""
        return self._fd

    def set(self) -> None:
        """Ends the wait that goes on, or the next one."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Resets the flag."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Gives the descriptor back; not used any more after that."""
        os.close(self._fd)


class EngineCore:
    """Drives a scheduler and a step queue by messages of the front. With `overlap`, the next step is planned and
    submitted while one runs; otherwise when its result is known. Tokens are the same either way. `wake` is set when a
    grammar is compiled. `read_adapter` reads an adapter's folder in a thread of its own and raises AdapterError.
    `block_events` are sent to the front. `exchange` handles blocks from and for other services."""

    def __init__(
        self,
        link: ParentLink[ToEngine],
        scheduler: Scheduler,
        steps: StepQueue,
        wake: Wake,
        *,
        overlap: bool,
        read_adapter: ReadAdapter | None = None,
        block_events: BlockEvents | None = None,
        exchange: BlockExchange | None = None,
    ) -> None:
        self._link = link
        self._block_events = block_events
        self._wake = wake
        self._read_adapter = read_adapter
        self._exchange = exchange
        self._scheduler = scheduler
        self._steps = steps
        # Two steps: between them only the tokens that the first one chose are filled in. Each further step in advance
        # would compute one more useless token for every sequence that ends.
        self._depth = 2 if overlap else 1
        self._under_way: deque[Step] = deque()
        self._next_proof = 0.0
        self._next_beat = math.inf if steps.beat_seconds is None else 0.0
        self._news = select.poll()  # `select` takes no descriptor above 1023, which a busy front has
        for descriptor in (link.fileno(), wake.fileno()):
            self._news.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Serves until the front goes away (EOFError)."""
        while True:
            while (message := self._link.poll()) is not None:
                self._take(message)
            self._scheduler.expire(time.monotonic())
            worked = self.step()
            self._report_notices()
            if not worked:
                self._rest()

    def step(self) -> bool:
        """Plans a step; if no further one may be planned, waits for the oldest step's result. False if there was
        nothing to do."""
        step, started = self._scheduler.schedule()
        for event in started:
            self._link.send(event)
        if step is not None:
            self._steps.submit(step.plan)
            self._under_way.append(step)
            if len(self._under_way) < self._depth:
                return True
        if not self._under_way:
            return False
        try:
            result = self._steps.collect()
        except StepMemoryError as error:
            self._abandon(error)
            return True
        step = self._under_way.popleft()
        output = self._scheduler.finish(step, result)
        if self._under_way and (masks := self._scheduler.masks(self._under_way[0])):
            self._steps.mask(masks)  # before anything else: the next step is computed meanwhile, and waits for them
        if step.prefill:
            self._link.send(Prefills([_prefilled(*part, result) for part in step.prefill]))
        for news in (*output.prompt_logprobs, *output.pooled):
            self._link.send(news)
        self._report_blocks()
        if output.tokens:
            self._link.send(Tokens(output.tokens, time.perf_counter()))
        return True

    def _abandon(self, error: StepMemoryError) -> None:
        """Replaces the steps under way, the first of which ran out of memory, by smaller ones. Raises the error if none
        can be smaller."""
        abandoned = list(self._under_way)
        self._under_way.clear()
        for _ in abandoned[1:]:
            with contextlib.suppress(StepMemoryError):
                self._steps.collect()
        tokens = sum(count for _, count in abandoned[0].work)
        if not self._scheduler.abandon(abandoned):
            raise error
        _log.warning("too little memory for a step: running requests begin anew, in smaller steps", tokens=tokens)
        self._steps.go_on()
        self._report_blocks()

    def _report_blocks(self) -> None:
        if self._block_events is not None and (events := self._block_events.take()):
            self._link.send(BlocksChanged(events))

    def _report_notices(self) -> None:
        notices = self._scheduler.take_notices()
        if notices.rows_read:
            self._link.send(RowsRead(notices.rows_read))
        for news in (*notices.complete, *notices.failed, *notices.rows_needed):
            self._link.send(news)
        if notices.released:
            self._link.send(Released(notices.released))

    def _rest(self) -> None:
        """Waits for a message, a grammar or the next deadline. An engine that becomes idle checks its integrity now and
        then. It also sends the ranks a sign of life while idle, however often messages interrupt the wait, so that they
        do not wait for a plan without end."""
        if time.monotonic() >= self._next_proof:
            self._scheduler.check_integrity()
            self._next_proof = time.monotonic() + _PROOF_SECONDS
        if self._steps.beat_seconds is not None and time.monotonic() >= self._next_beat:
            self._steps.beat()
            self._next_beat = time.monotonic() + self._steps.beat_seconds
        deadline = self._scheduler.next_deadline()
        due = min(self._next_beat, math.inf if deadline is None else deadline) - time.monotonic()
        self._report_blocks()
        self._news.poll(1000 * min(_LONGEST_REST, max(0.0, due)))
        self._wake.clear()

    def _take(self, message: ToEngine) -> None:
        answer: FromEngine | None = None
        match message:
            case Add():
                self._scheduler.add(message)
            case Landed(id, item, rows):
                self._scheduler.landed(id, item, rows)
            case RowsPlaced(id, places):
                self._scheduler.placed(id, places)
            case PromptLogprobsTaken(id, before):
                self._scheduler.prompt_logprobs_taken(id, before)
            case Abort(id, choice):
                self._scheduler.abort(id, choice)
            case EndSessions(sessions):
                for session in sessions:
                    self._scheduler.end_session(session)
            case LoadAdapter():
                reading = in_daemon_thread(self._load_adapter, message)
                reading.add_done_callback(partial(self._adapter_read, message.id))
            case DropAdapter(id):
                self._scheduler.adapter_slots.forget(id)
                self._steps.order(RemoveAdapter(id))
            case PullRows() | InvalidateRows() | UnmapPool():
                self._update_mirrors(message)
            case FindBlocks() | LendBlocks() | BlocksRead() | AwaitBlocks() | BlocksArrived():
                assert self._exchange is not None, "blocks are exchanged"
                self._exchange.take(message)
            case Flush():
                answer = Flushed(self._scheduler.blocks.flush())
            case GetState():
                answer = self._scheduler.state()
        if answer is not None:
            self._report_blocks()
            self._link.send(answer)

    def _update_mirrors(self, order: MirrorOrder) -> None:
        """Makes all ranks carry out an order for their mirrors; reports the result of a pull to the front."""

        def done(end: Pulled) -> None:
            if isinstance(order, PullRows):
                self._link.send(PullEnded(order.id, end))

        self._steps.order(order, done)

    def _load_adapter(self, message: LoadAdapter) -> None:
        """Reads an adapter while steps run, and gives it to every rank between two steps."""
        assert self._read_adapter is not None, "adapters are turned on"
        try:
            adapter = self._read_adapter(message.path)
            if message.digest not in (b"", adapter.digest):
                raise AdapterError("its folder has another adapter by now")
        except AdapterError as error:
            self._link.send(AdapterRead(message.id, error=str(error)))
        else:
            added = AdapterRead(message.id, adapter.digest, adapter.rank)
            self._steps.order(AddAdapter(message.id, adapter), lambda _: self._link.send(added))

    def _adapter_read(self, id: int, reading: Future[None]) -> None:
        """Tells those who wait for an adapter that there was no thread or memory to read it."""
        if (error := reading.exception()) is not None:
            with contextlib.suppress(EOFError):
                self._link.send(AdapterRead(id, error=str(error) or type(error).__name__, passing=True))


def _prefilled(sequence: Sequence, first: int, count: int, result: StepResult) -> Prefilled:
    return Prefilled(sequence.id, sequence.choice, first, count, result.began, result.ended)
