"""Between the thread that decides and the thread that computes.

Deciding (messages, scheduling, taking in results) runs in a thread of its own; computing keeps the process's main
thread, to which devices, streams and collectives are bound. With a depth of two, a step is planned and handed over
while the one before it is computed, so that between two steps there is only the filling in of the tokens that the
first one chose.

Why two threads and not two processes: a plan names thousands of block numbers, which a process would have to copy and
parse for each step, and the work in between is either outside the interpreter's lock (products, kernels, collectives)
or far smaller than a step. Why a depth of two and not more: every further step in advance computes one more token in
vain for each sequence that ends."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Protocol

import msgspec

from llm_service.plan import StepPlan, StepResult


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


class Pipeline:
    """Runs plans one after the other, in the order in which they were handed over.

    `submit`, `collect`, `beat` and `close` belong to the thread that decides, `work` to the one that computes.
    """

    def __init__(self, executor: Executor) -> None:
        self.beat_seconds = executor.beat_seconds
        self._executor = executor
        self._plans: SimpleQueue[StepPlan | str] = SimpleQueue()
        self._results: SimpleQueue[StepResult] = SimpleQueue()

    def submit(self, plan: StepPlan) -> None:
        """Hands over a plan; what it carries over comes from the plan handed over before it."""
        self._plans.put(plan)

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
            if isinstance(order, StepPlan):
                began = time.perf_counter()
                result = self._executor.run(order.filled(chosen))
                chosen = result.tokens
                self._results.put(msgspec.structs.replace(result, began=began, ended=time.perf_counter()))
            else:
                self._executor.beat()
