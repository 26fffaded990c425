"""Between the thread that decides and the thread that computes.

Deciding (messages, scheduling, taking in results) runs in a thread of its own; computing keeps the process's main
thread, to which devices, streams and collectives are bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import msgspec

from llm_service.plan import MirrorOrder, Pull, Pulled, StepPlan, StepResult


class Executor(Protocol):
    """Whatever runs a plan: one rank, a group of them, or a fake in tests.

    While there is nothing to run, `beat` is called every `beat_seconds`; None: not at all.
    """

    beat_seconds: float | None

    def beat(self) -> None:
        """Keeps in touch with the ranks; raises where one is gone."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Computes one step."""
        ...

    def obey(self, order: MirrorOrder) -> Pulled:
        """Has every rank do something to its mirror of the row arena."""
        ...


class StepQueue:
    """Runs plans one after the other, in the order in which they were handed over, and orders for the ranks' mirrors
    between them.

    `submit`, `order`, `collect`, `beat` and `close` belong to the thread that decides, `work` to the one that computes,
    which calls `on_pulled` for each `Pull`, with its id and what came of it.

    Two threads, not two processes: a plan names thousands of block numbers, which a process would have to copy and
    parse for each step; and the work in between is either outside the interpreter's lock or far smaller than a step.
    """

    def __init__(self, executor: Executor, on_pulled: Callable[[int, Pulled], None] = lambda *_: None) -> None:
        self.beat_seconds = executor.beat_seconds
        self._executor = executor
        self._on_pulled = on_pulled
        self._plans: SimpleQueue[StepPlan | MirrorOrder | str] = SimpleQueue()
        self._results: SimpleQueue[StepResult] = SimpleQueue()
        self._since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """For how long the computing thread has been at what it is doing; for any thread."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, plan: StepPlan) -> None:
        """Hands over a plan; what it carries over comes from the plan handed over before it."""
        self._plans.put(plan)

    def order(self, order: MirrorOrder) -> None:
        """Hands over an order, which is obeyed before every plan that is handed over later."""
        self._plans.put(order)

    def collect(self) -> StepResult:
        """Waits for the result of the oldest plan that has not been collected."""
        return self._results.get()

    def beat(self) -> None:
        """Has the computing thread keep in touch with its ranks. For when there is nothing to compute."""
        self._plans.put("beat")

    def close(self) -> None:
        """Lets `work` return when it is through with what it has."""
        self._plans.put("close")

    def work(self) -> None:
        """Computes until `close`. An error of the executor ends it, and with it the process."""
        chosen: list[int] = []
        while (order := self._plans.get()) != "close":
            self._since = time.monotonic()
            if isinstance(order, StepPlan):
                began = time.perf_counter()
                result = self._executor.run(order.filled(chosen))
                chosen = result.tokens
                self._results.put(msgspec.structs.replace(result, began=began, ended=time.perf_counter()))
            elif isinstance(order, str):
                self._executor.beat()
            else:
                end = self._executor.obey(order)
                if isinstance(order, Pull):
                    self._on_pulled(order.id, end)
            self._since = None
