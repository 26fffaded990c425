"""Connects the deciding and the computing thread.

A thread of its own decides: messages, scheduling, results. The main thread computes, since devices, streams and
collectives are bound to it.
"""

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
from llm_service.worker.messages import OffloadBlocks, Pulled, RankOrder


class StepUnderWay(Protocol):
    """A step that has begun."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result. Any thread may call it, once."""
        ...


class Executor(Protocol):
    """Computes plans: one rank, a group of ranks, or a fake in tests.

    `beat` is called every `beat_seconds` while there is nothing to run; None: never.
    """

    beat_seconds: float | None

    def beat(self) -> None:
        """Keeps in touch with the ranks; raises if one is gone."""
        ...

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> StepUnderWay:
        """Begins a step; the tokens it carries over are those of the step launched before it. The masks that follow the
        plan are requested when it is to draw. On a CPU the step is over on return. Raises StepMemoryError, and computes
        nothing more of the step, if memory is short and the next step may be smaller."""
        ...

    def obey(self, order: RankOrder) -> Pulled:
        """Has every rank carry out an order, and waits for that. Returns what became of a `PullRows`; LANDED for other
        orders."""
        ...


class _Signal(enum.Enum):
    """Signals to the computing thread, besides plans and orders."""

    BEAT = enum.auto()
    GO_ON = enum.auto()
    CLOSE = enum.auto()


class _ClosedError(Exception):
    """The deciding thread has ended."""


@dataclass(frozen=True, slots=True)
class _Ordered:
    """An order, and the function to call when all ranks have carried it out."""

    order: RankOrder
    done: Callable[[Pulled], None]


@dataclass(frozen=True, slots=True)
class _NotComputed:
    """A step that ran out of memory, or that was to continue from such a step."""

    error: StepMemoryError

    def result(self) -> StepResult:
        raise self.error


class StepQueue:
    """Launches plans in the order in which they were submitted, with orders for the ranks in between.

    The deciding thread calls `submit`, `mask`, `order`, `collect`, `beat` and `close`; the computing thread calls
    `work`. The deciding thread waits for a step's tokens while the computing thread launches the next step, so a GPU
    waits for neither.

    These are threads and not processes because a plan names thousands of block numbers, which would have to be copied
    and parsed for each step; and the work of both is either outside the interpreter's lock or much shorter than a step.
    """

    def __init__(self, executor: Executor) -> None:
        self.beat_seconds = executor.beat_seconds
        self._executor = executor
        self._plans: SimpleQueue[StepPlan | _Ordered | _Signal] = SimpleQueue()
        self._masks: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._launched: SimpleQueue[StepUnderWay] = SimpleQueue()
        self._ended = 0.0
        self._launching_since: float | None = None
        self._collecting_since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds that the computing thread has spent on its current work, or that a step has been waited for. Any
        thread may call it."""
        since = [each for each in (self._launching_since, self._collecting_since) if each is not None]
        return time.monotonic() - min(since) if since else 0.0

    def submit(self, plan: StepPlan) -> None:
        """Submits a plan, which continues from the plan submitted before it."""
        self._plans.put(plan)

    def mask(self, masks: list[bytes]) -> None:
        """Hands over the masks of the plan handed over last, one for each draw that waits for one. It comes after the
        result of the plan before that has been collected, and before any further plan."""
        self._masks.put(masks)

    def _next_masks(self) -> list[bytes]:
        if (masks := self._masks.get()) is None:
            raise _ClosedError
        return masks

    def order(self, order: RankOrder, done: Callable[[Pulled], None] = lambda _: None) -> None:
        """Submits an order, which is carried out after all plans submitted before and before all submitted later. The
        computing thread calls `done` with the result (see `Executor.obey`) when all ranks have carried it out. An
        `AddAdapter` may come from any thread."""
        self._plans.put(_Ordered(order, done))

    def collect(self) -> StepResult:
        """Waits for the result of the oldest plan not collected yet. Its step begins, at the earliest, when the one
        before has ended. Raises StepMemoryError if it ran out of memory; no plan submitted after it is computed before
        `go_on`."""
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
                self._masks.get_nowait()  # masks of plans that were not computed
        self._plans.put(_Signal.GO_ON)

    def beat(self) -> None:
        """Has the computing thread keep in touch with its ranks; to be called while there is nothing to compute."""
        self._plans.put(_Signal.BEAT)

    def close(self) -> None:
        """Lets `work` return when it has finished its work, or is waiting for masks that will not come."""
        self._plans.put(_Signal.CLOSE)
        self._masks.put(None)

    def work(self) -> None:
        """Computes until `close`. An error of the executor ends it, and with it the process, but for too little memory
        for a step."""
        failed: StepMemoryError | None = None
        while (work := self._plans.get()) is not _Signal.CLOSE:
            self._launching_since = time.monotonic()
            match work:
                case StepPlan() if failed is not None:
                    self._launched.put(_NotComputed(failed))
                case StepPlan():
                    try:
                        self._launched.put(self._executor.launch(work, self._next_masks))
                    except _ClosedError:
                        return
                    except StepMemoryError as error:
                        failed = error
                        self._launched.put(_NotComputed(error))
                case _Signal.GO_ON:
                    failed = None
                case _Ordered(OffloadBlocks()) if failed is not None:
                    raise failed  # the blocks of a step that was not computed are empty
                case _Ordered(order, done):
                    done(self._executor.obey(order))
                case _Signal.BEAT:
                    self._executor.beat()
            self._launching_since = None
