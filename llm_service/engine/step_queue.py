"""Between the thread that decides and the thread that computes.

Deciding (messages, scheduling, taking in results) runs in a thread of its own; computing keeps the process's main
thread, to which devices, streams and collectives are bound."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from llm_service.plan import Masks, StepMemoryError, StepPlan, StepResult, no_masks
from llm_service.worker.messages import (
    AdapterOrder,
    AddAdapter,
    InvalidateRows,
    MirrorOrder,
    OffloadBlocks,
    Pulled,
    PullRows,
    RemoveAdapter,
    UnmapPool,
)


class StepUnderWay(Protocol):
    """A step that has begun."""

    def result(self) -> StepResult:
        """What came of it; waits until it is over. For any thread, once."""
        ...


class Executor(Protocol):
    """Whatever computes plans: one rank, a group of them, or a fake in tests.

    While there is nothing to run, `beat` is called every `beat_seconds`; None: not at all.
    """

    beat_seconds: float | None

    def beat(self) -> None:
        """Keeps in touch with the ranks; raises where one is gone."""
        ...

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> StepUnderWay:
        """Begins a step, whose carried tokens are those of the step launched before it, and asks for the masks that
        follow its plan when it is to draw. On a CPU it is over then. Raises StepMemoryError, and computes nothing more
        of it, where there is too little memory and the next step may have fewer tokens."""
        ...

    def obey(self, order: MirrorOrder) -> Pulled:
        """Has every rank do something to its mirror of the row arena."""
        ...

    def adapt(self, order: AdapterOrder) -> None:
        """Has every rank keep an adapter, or let go of one."""
        ...

    def offload(self, order: OffloadBlocks) -> None:
        """Has every rank copy KV blocks to the host; waits until they are there."""
        ...


class _Signal(enum.Enum):
    """What the computing thread is told beside plans and orders."""

    BEAT = enum.auto()
    GO_ON = enum.auto()
    CLOSE = enum.auto()


class _ClosedError(Exception):
    """Nobody decides any more."""


@dataclass(frozen=True, slots=True)
class _Offload:
    """Copies to the host, and who waits for them."""

    order: OffloadBlocks
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _NotComputed:
    """A step for which there was too little memory, or that was to go on from such a one."""

    error: StepMemoryError

    def result(self) -> StepResult:
        raise self.error


class StepQueue:
    """Launches plans one after the other, in the order in which they were handed over, and orders for the ranks'
    mirrors between them.

    `submit`, `mask`, `order`, `offload`, `collect`, `beat` and `close` belong to the thread that decides, `work` to
    the one that computes, which calls `on_pulled` for each `PullRows`, with its id and what came of it, and `on_added`
    when all ranks have an adapter. The one that decides waits for a step's tokens; so on a GPU the other one launches
    the next step meanwhile, and the GPU never waits for either.

    Two threads, not two processes: a plan names thousands of block numbers, which a process would have to copy and
    parse for each step; and the work in between is either outside the interpreter's lock or far smaller than a step.
    """

    def __init__(
        self,
        executor: Executor,
        on_pulled: Callable[[int, Pulled], None] = lambda *_: None,
        on_added: Callable[[AddAdapter], None] = lambda _: None,
    ) -> None:
        self.beat_seconds = executor.beat_seconds
        self._executor = executor
        self._on_pulled = on_pulled
        self._on_added = on_added
        self._plans: SimpleQueue[StepPlan | MirrorOrder | AdapterOrder | _Offload | _Signal] = SimpleQueue()
        self._masks: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._launched: SimpleQueue[StepUnderWay] = SimpleQueue()
        self._ended = 0.0
        self._launching_since: float | None = None
        self._collecting_since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """For how long the computing thread has been at what it is doing, or a step has been waited for; for any
        thread."""
        since = [each for each in (self._launching_since, self._collecting_since) if each is not None]
        return time.monotonic() - min(since) if since else 0.0

    def submit(self, plan: StepPlan) -> None:
        """Hands over a plan; what it carries over comes from the plan handed over before it."""
        self._plans.put(plan)

    def mask(self, masks: list[bytes]) -> None:
        """Hands over the masks of the plan handed over last, one for each draw that waits for one. It comes after the
        result of the plan before that has been collected, and before any further plan."""
        self._masks.put(masks)

    def _next_masks(self) -> list[bytes]:
        if (masks := self._masks.get()) is None:
            raise _ClosedError
        return masks

    def order(self, order: MirrorOrder | AdapterOrder) -> None:
        """Hands over an order, which is obeyed before every plan that is handed over later. An `AddAdapter` may come
        from any thread."""
        self._plans.put(order)

    def offload(self, order: OffloadBlocks, done: Callable[[], None]) -> None:
        """Hands over an order likewise; the computing thread calls `done` when all ranks are through with it."""
        self._plans.put(_Offload(order, done))

    def collect(self) -> StepResult:
        """Waits for the result of the oldest plan that has not been collected. A step begins, at the earliest, when the
        one before it has ended. Raises StepMemoryError where there was too little memory for it: then none that was
        handed over behind it is computed, before `go_on`."""
        self._collecting_since = time.monotonic()
        try:
            result = self._launched.get().result()
        finally:
            self._collecting_since = None
        began, self._ended = max(result.began, self._ended), result.ended
        return msgspec.structs.replace(result, began=began)

    def go_on(self) -> None:
        """Has plans computed again that are handed over from now on. All before have been collected, and the one that
        failed carries nothing over."""
        with suppress(Empty):
            while True:
                self._masks.get_nowait()  # of plans that were not computed
        self._plans.put(_Signal.GO_ON)

    def beat(self) -> None:
        """Has the computing thread keep in touch with its ranks. For when there is nothing to compute."""
        self._plans.put(_Signal.BEAT)

    def close(self) -> None:
        """Lets `work` return when it is through with what it has, or waits for masks, which will never come."""
        self._plans.put(_Signal.CLOSE)
        self._masks.put(None)

    def work(self) -> None:
        """Computes until `close`. An error of the executor ends it, and with it the process, but for too little memory
        for a step."""
        failed: StepMemoryError | None = None
        while (order := self._plans.get()) is not _Signal.CLOSE:
            self._launching_since = time.monotonic()
            match order:
                case StepPlan() if failed is not None:
                    self._launched.put(_NotComputed(failed))
                case StepPlan():
                    try:
                        self._launched.put(self._executor.launch(order, self._next_masks))
                    except _ClosedError:
                        return
                    except StepMemoryError as error:
                        failed = error
                        self._launched.put(_NotComputed(error))
                case _Signal.GO_ON:
                    failed = None
                case PullRows():
                    self._on_pulled(order.id, self._executor.obey(order))
                case InvalidateRows() | UnmapPool():
                    self._executor.obey(order)
                case AddAdapter():
                    self._executor.adapt(order)
                    self._on_added(order)
                case RemoveAdapter():
                    self._executor.adapt(order)
                case _Offload():
                    if failed is not None:  # of what was to be computed
                        raise failed
                    self._executor.offload(order.order)
                    order.done()
                case _Signal.BEAT:
                    self._executor.beat()
            self._launching_since = None
