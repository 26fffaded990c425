"""Two threads: one decides, one computes; and the engine's loop between the front and them."""

from __future__ import annotations

import _thread
import os
import resource
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_service.engine.block_manager import BlockManager
from llm_service.engine.core import EngineCore, Wake
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import (
    Abort,
    Add,
    Failed,
    Flush,
    Flushed,
    GetState,
    ItemRows,
    LoadAdapter,
    Released,
    Started,
    State,
    Tokens,
)
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.step_queue import StepQueue
from llm_service.model_config.adapter_folder import Adapter
from llm_service.plan import Draw, Masks, StepMemoryError, StepPlan, StepResult, no_masks
from llm_service.request import MediaRun, SamplingParams
from llm_service.worker.messages import InvalidateRows, OffloadBlocks, Pulled, PullRows, RankOrder, UnmapPool
from testkit.in_turn import InTurn
from tests.unit.llm_service.hashed import EOS, ROW_BYTES, HashExecutor, Order, alternating, expected
from tests.waiting import until

WAIT = 180.0


class Recorder(InTurn):
    """Answers each plan with its own number; computes only when it is let."""

    beat_seconds: float | None = 1.0

    def __init__(self) -> None:
        super().__init__(self.run)
        self.may_go = threading.Semaphore(0)
        self.seen: list[list[int] | RankOrder] = []
        self.beats = 0

    def run(self, plan: StepPlan) -> StepResult:
        assert self.may_go.acquire(timeout=WAIT)
        self.seen.append(array("i", plan.token_ids).tolist())
        return StepResult([100 + len(self.seen)] * len(plan.draws), [None] * len(plan.draws))

    def obey(self, order: RankOrder) -> Pulled:
        self.seen.append(order)
        return Pulled.DAMAGED

    def beat(self) -> None:
        self.beats += 1


def plan(token: int, carried: list[tuple[int, int]]) -> StepPlan:
    return StepPlan(array("i", [token]).tobytes(), bytes(12), [], [], [Draw(at=0)], carried)


@contextmanager
def deciding(steps: StepQueue) -> Iterator[None]:
    """Computes in another thread for the length of the block."""
    computing = threading.Thread(target=steps.work)
    computing.start()
    try:
        yield
    finally:
        steps.close()
        computing.join(WAIT)
        assert not computing.is_alive()


def test_a_plan_is_handed_over_before_the_one_in_front_of_it_is_computed_and_gets_its_token() -> None:
    recorder = Recorder()
    steps = StepQueue(recorder)
    with deciding(steps):
        steps.submit(plan(7, []))
        steps.submit(plan(0, [(0, 0)]))
        assert recorder.seen == []
        recorder.may_go.release(2)
        assert [steps.collect().tokens, steps.collect().tokens] == [[101], [102]]
    assert recorder.seen == [[7], [101]]


def test_orders_for_the_mirrors_are_obeyed_between_steps_and_what_came_of_pulls_is_told() -> None:
    recorder, told = Recorder(), list[tuple[str, Pulled]]()
    steps = StepQueue(recorder)
    pull = PullRows(id=5, region="pool", handle=b"", source=0, target=0, size=64, row_sum=0)
    recorder.may_go.release(2)
    with deciding(steps):
        steps.submit(plan(7, []))
        for order in (InvalidateRows(0, 64), pull, UnmapPool("pool")):
            steps.order(order, lambda end, order=order: told.append((type(order).__name__, end)))
        steps.submit(plan(0, [(0, 0)]))
        assert steps.collect().tokens == [101]
        steps.collect()
    assert recorder.seen == [[7], InvalidateRows(0, 64), pull, UnmapPool("pool"), [101]]
    assert told == [(name, Pulled.DAMAGED) for name in ("InvalidateRows", "PullRows", "UnmapPool")]


class Late:
    """A step of a GPU: over when it is let, and begun long before."""

    def __init__(self, number: int, over: threading.Semaphore) -> None:
        self._number, self._over = number, over

    def result(self) -> StepResult:
        assert self._over.acquire(timeout=WAIT)
        return StepResult([self._number], [None], began=self._number, ended=self._number + 10.0)


class Device(InTurn):
    """Launches steps, and has none of them over before it is let."""

    def __init__(self) -> None:
        super().__init__(lambda _: StepResult([], []))
        self.over, self.both = threading.Semaphore(0), threading.Barrier(2)
        self._launches = 0

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Any:
        self._launches += 1
        if self._launches == 2:
            self.both.wait(WAIT)
        return Late(self._launches, self.over)


def test_the_next_step_is_launched_before_the_one_in_front_of_it_is_over() -> None:
    device = Device()
    steps = StepQueue(device)
    with deciding(steps):
        assert steps.busy_seconds == 0.0
        steps.submit(plan(7, []))
        steps.submit(plan(0, [(0, 0)]))
        device.both.wait(WAIT)
        device.over.release(2)
        first, second = steps.collect(), steps.collect()
    assert [first.tokens, second.tokens] == [[1], [2]]
    assert (first.began, first.ended) == (1.0, 11.0)
    assert (second.began, second.ended) == (11.0, 12.0), "a step begins when the one before it has ended"


class Masked(InTurn):
    """Notes which masks a step gets, when it has begun."""

    def __init__(self) -> None:
        super().__init__(lambda _: StepResult([], []))
        self.begun, self.masks = threading.Event(), list[bytes]()

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Any:
        if plan.carried:
            self.begun.set()
            self.masks.extend(masks())
        return super().launch(msgspec.structs.replace(plan, carried=[]))


def test_a_step_is_begun_before_its_masks_are_known() -> None:
    executor = Masked()
    steps = StepQueue(executor)
    with deciding(steps):
        steps.submit(plan(7, []))
        steps.submit(plan(0, [(0, 0)]))
        steps.collect()
        assert executor.begun.wait(WAIT)
        assert executor.masks == []
        steps.mask([b"one", b"other"])
        steps.collect()
    assert executor.masks == [b"one", b"other"]


def test_whoever_waits_for_masks_ends_with_the_one_who_decides() -> None:
    executor = Masked()
    steps = StepQueue(executor)
    with deciding(steps):
        steps.submit(plan(0, [(0, 0)]))
        assert executor.begun.wait(WAIT)


def test_a_device_that_is_silent_is_noticed_by_whoever_waits_for_it() -> None:
    device = Device()
    steps = StepQueue(device)
    with deciding(steps):
        steps.submit(plan(7, []))
        waiting = threading.Thread(target=steps.collect)
        waiting.start()
        until(lambda: steps.busy_seconds > 0.0, "the step is waited for")
        device.over.release()
        waiting.join(WAIT)
        until(lambda: steps.busy_seconds == 0.0, "nothing is waited for")


def test_a_sign_of_life_comes_from_the_thread_that_computes() -> None:
    recorder = Recorder()
    steps = StepQueue(recorder)
    with deciding(steps):
        steps.beat()
    assert recorder.beats == 1


class Link:
    """The front as the engine's loop sees it: gives messages, one batch for each turn of the loop, then is gone."""

    def __init__(self, turns: list[list[Any]]) -> None:
        self.sent: list[Any] = []
        self._turns = deque(turns)
        self._now: deque[Any] = deque()
        self._told = True
        self._readable, self._end = os.pipe()
        os.write(self._end, b"!")

    def close(self) -> None:
        os.close(self._readable)
        os.close(self._end)

    def poll(self) -> Any:
        if self._now:
            return self._now.popleft()
        if self._told:
            self._told = False
            if not self._turns:
                raise EOFError
            self._now.extend(self._turns.popleft())
            return self.poll() if self._now else self._end_of_turn()
        return self._end_of_turn()

    def _end_of_turn(self) -> None:
        self._told = True

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def fileno(self) -> int:
        """Always readable: the next turn never has to be waited for."""
        return self._readable


def add(id: int, order: Order) -> Add:
    return Add(
        id=id,
        token_ids=array("i", order.prompt).tobytes(),
        positions=np.tile(np.arange(len(order.prompt), dtype=np.int32), (3, 1)).tobytes(),
        mrope_delta=0,
        items=[],
        sampling=order.sampling,
        salt="",
        priority=0,
        deadline=order.deadline,
    )


def served(
    turns: list[list[Any]],
    *,
    overlap: bool,
    executor: InTurn | None = None,
    read_adapter: Callable[[str], Adapter] | None = None,
) -> list[Any]:
    """What the engine says when the front says this, turn by turn."""
    steps = StepQueue(executor or InTurn(HashExecutor(4).run))
    scheduler = Scheduler(BlockManager(64, 4), SchedulerLimits(8, 16, 256), frozenset({EOS}), ROW_BYTES, alternating)
    link, wake = Link(turns), Wake()
    core = EngineCore(link, scheduler, steps, wake, overlap=overlap, read_adapter=read_adapter)  # type: ignore[arg-type]
    try:
        with deciding(steps), pytest.raises(EOFError):
            core.run()
    finally:
        wake.close()
        link.close()
    return link.sent


HELD = [
    Order(tuple(range(2, 9)), SamplingParams(max_tokens=12, temperature=1.0, seed=seed, grammar="alternating"))
    for seed in (1, 2)
]
ORDERS = [
    Order(tuple(range(1, 12)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)),
    Order(tuple(range(3, 25)), SamplingParams(max_tokens=9, temperature=1.0, seed=4, repetition_penalty=1.5)),
    Order((5, 6), SamplingParams(max_tokens=20, temperature=1.0, seed=9)),
]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_said_does_not_depend_on_the_overlap(overlap: bool) -> None:
    orders = [*ORDERS, *HELD]
    adds: list[list[Any]] = [[add(n, order)] for n, order in enumerate(orders, 1)]
    sent = served([*adds, *[[]] * 40], overlap=overlap)
    said: dict[int, list[int]] = {n: [] for n in range(1, len(orders) + 1)}
    for message in sent:
        if isinstance(message, Tokens):
            for token in message.tokens:
                said[token.id].append(token.token)
    limits = SchedulerLimits(8, 16, 256)
    assert said == {n: expected(order, 0, limits)[0] for n, order in enumerate(orders, 1)}
    assert sorted(id for message in sent if isinstance(message, Released) for id in message.ids) == [*said]
    assert [message.id for message in sent if isinstance(message, Started)] == [*said]


class TooSmall(InTurn):
    """Has too little memory for steps of more than so many tokens, and for every fourth one; what it held is lost
    then."""

    def __init__(self, most: int) -> None:
        self.cache, self.launches, self.failed, self._most = HashExecutor(4), 0, 0, most
        super().__init__(self.cache.run)

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Any:
        self.launches += 1
        if plan.tokens > self._most or (plan.tokens > 1 and self.launches % 4 == 0):
            self.failed += 1
            self.cache = HashExecutor(4)
            self._run = self.cache.run
            raise StepMemoryError("too little")
        return super().launch(plan, masks)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_goes_on_with_smaller_steps_where_memory_is_too_small_and_says_the_same(overlap: bool) -> None:
    orders, executor = [*ORDERS, *HELD], TooSmall(8)
    sent = served([[add(n, each) for n, each in enumerate(orders, 1)], *[[]] * 200], overlap=overlap, executor=executor)
    said = {n: list[int]() for n in range(1, len(orders) + 1)}
    for token in (each for message in sent if isinstance(message, Tokens) for each in message.tokens):
        said[token.id].append(token.token)
    assert said == {n: expected(each, 0, SchedulerLimits(8, 16, 256))[0] for n, each in enumerate(orders, 1)}
    assert executor.failed > 1
    assert sorted(message.id for message in sent if isinstance(message, Started)) == [*said]
    assert sorted(id for message in sent if isinstance(message, Released) for id in message.ids) == [*said]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_ends_where_memory_is_too_small_for_a_step_of_one_token(overlap: bool) -> None:
    with pytest.raises(StepMemoryError, match="too little"):
        served([[add(1, ORDERS[0])], *[[]] * 200], overlap=overlap, executor=TooSmall(0))


def test_blocks_that_were_to_be_computed_are_lent_to_nobody() -> None:
    steps = StepQueue(TooSmall(0))
    steps.submit(plan(7, []))
    steps.order(OffloadBlocks([(0, 0)]), lambda _: pytest.fail("they are not there"))
    with pytest.raises(StepMemoryError):
        steps.work()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_is_released_when_no_step_under_way_holds_it_and_nothing_is_said_after(overlap: bool) -> None:
    turns: list[list[Any]] = [[add(1, ORDERS[0])], [], [], [Abort(1)], [], [], [Flush()], [GetState()]]
    sent = served(turns, overlap=overlap)
    place = sent.index(Released([1]))
    assert not any(isinstance(message, Tokens | Started | Failed) for message in sent[place:])
    states = [message for message in sent if isinstance(message, State)]
    assert states[-1].kv_blocks_used == 0
    assert any(isinstance(message, Flushed) and message.blocks > 0 for message in sent)


def test_a_request_that_is_late_is_told_so_before_it_is_released() -> None:
    late = Order(ORDERS[0].prompt, ORDERS[0].sampling, deadline=0.0)
    sent = served([[add(1, late)]], overlap=True)
    assert [type(message) for message in sent] == [Failed, Released]
    assert sent[0].reason == "DEADLINE_EXCEEDED"


def test_a_deadline_farther_off_than_any_timer_reaches_is_only_a_deadline() -> None:
    """`grpc-timeout: 99999999H` is a header that a caller may send."""
    far = replace(ORDERS[0], deadline=time.monotonic() + 99_999_999 * 3600.0)
    waiting = msgspec.structs.replace(add(1, far), items=[ItemRows(bytes(32), 0, (MediaRun(0, 0, 4),), 0)])
    sent = served([[waiting], [], [GetState()]], overlap=True)
    assert [type(message) for message in sent] == [State]
    assert sent[0].waiting == 1


@pytest.mark.parametrize("lacking", ["threads", "memory"])
def test_an_adapter_that_cannot_be_read_now_ends_no_engine(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    def read(path: str) -> Adapter:
        raise MemoryError

    if lacking == "threads":
        monkeypatch.setattr(_thread, "start_new_thread", refuse)
    sent = served([[LoadAdapter(1, "x")]], overlap=True, read_adapter=read)
    until(lambda: sent, "whoever waits for it is told")
    assert [(read.id, read.error, read.passing) for read in sent] == [
        (1, "can't start new thread" if lacking == "threads" else "MemoryError", True)
    ]


def test_an_engine_rests_whose_descriptors_have_large_numbers() -> None:
    """They have the numbers that they had in the front, which has a descriptor for each of its callers."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 1500:
        pytest.skip("this machine allows too few descriptors")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (allowed, most))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, 1500), most))
        while (descriptor := os.open(os.devnull, os.O_RDONLY)) < 1024:
            stack.callback(os.close, descriptor)
        stack.callback(os.close, descriptor)
        assert [type(message) for message in served([[], [GetState()]], overlap=True)] == [State]


def test_ranks_hear_from_an_engine_that_rests_though_questions_never_let_it_rest_for_long() -> None:
    class Group(InTurn):
        beats = 0

        def beat(self) -> None:
            self.beats += 1

    group = Group(HashExecutor(4).run)
    group.beat_seconds = 0.0
    served([[GetState()]] * 5, overlap=True, executor=group)
    assert group.beats >= 5
