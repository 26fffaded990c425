"""The dispatcher, with workers that live and die as the tests say."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.errors import Internal, Unavailable
from common.process.children import Child
from encoder_service.engine import dispatch
from encoder_service.engine.batch_history import BatchStats
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.workers import WorkerError, WorkerTimes
from encoder_service.worker.messages import BatchDone, BatchFailed, StartFailed
from tests.unit.encoder_service.fakes import DONE, LIMITS, SETTINGS, TIMES, FakeChild, marks, submit, turns


async def test_what_comes_together_goes_together_and_what_comes_later_waits(start):
    dispatcher, (worker,), _ = await start()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(3)]
    await turns()
    late = submit(dispatcher, b"late", at=9)
    await turns()
    assert marks(worker) == [[0, 1, 2]]
    assert (len(dispatcher.running), list(dispatcher.waiting)) == (3, [late])
    worker.say(DONE)
    await turns()
    assert all(unit.done.done() for unit in units)
    assert marks(worker) == [[0, 1, 2], [9]]
    assert (dispatcher.totals.vit_calls, dispatcher.totals.vit_patches) == (1, 30)


async def test_a_part_of_a_batch_that_is_answered_is_done_before_the_rest(start):
    dispatcher, (worker,), _ = await start()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(4)]
    await turns()
    worker.say(BatchDone([], 0.0, 0.0, pieces=[2]))
    await turns()
    assert [unit.done.done() for unit in units] == [False, False, True, False]
    late = submit(dispatcher, b"late", at=9)
    await turns()
    assert (marks(worker), dispatcher.running) == ([[0, 1, 2, 3]], [units[0], units[1], units[3]])
    worker.say(BatchDone([1], 0.0, 0.0, pieces=[0, 3]))
    await turns()
    assert units[0].done.result() is None
    assert isinstance(units[3].done.exception(), Internal), "the second of those that the answer names"
    worker.say(BatchDone([], 0.0, 0.0, pieces=[1]))
    await turns()
    assert (marks(worker)[1:], units[1].done.done()) == ([[9]], True)
    assert (dispatcher.totals.vit_calls, dispatcher.totals.vit_patches) == (3, 40)
    assert not late.done.done()


async def test_only_what_was_not_answered_of_a_batch_runs_again(start):
    """Whether a part fails or the worker dies."""
    dispatcher, children, _ = await start(device="cuda:0")
    units = [submit(dispatcher, bytes([at]), patches=20, at=at) for at in range(4)]
    await turns()
    children[0].say(BatchFailed(why="no memory", pieces=[1]))
    children[0].say(BatchDone([], 0.0, 0.0, pieces=[0]))
    await turns()
    assert [unit.done.done() for unit in units] == [True, False, False, False]
    assert marks(children[0]) == [[0, 1, 2, 3]]
    children[0].say(BatchDone([], 0.0, 0.0, pieces=[2, 3]))
    await turns()
    assert marks(children[0])[1:] == [[1]], "alone"
    children[0].say(BatchFailed(why="no memory"))
    await turns()
    assert isinstance(units[1].done.exception(), Internal)


async def test_who_waits_while_others_go_is_counted_and_goes_before_any_priority_in_the_end(start):
    dispatcher, (worker,), _ = await start(budget=10)
    patient = submit(dispatcher, b"patient", at=1000)
    dispatcher.withdraw(patient)
    submit(dispatcher, b"first", at=0)
    await turns()
    patient = submit(dispatcher, b"patient", at=1000)
    for at in range(1, 60):
        submit(dispatcher, b"urgent", at=at).priority = 7
        worker.say(DONE)
        await turns()
        if patient.started_at:
            break
    assert marks(worker) == [[at] for at in range(33)] + [[1000]]


async def test_a_worker_on_a_gpu_gets_its_next_batch_while_it_computes_once_that_is_full(start):
    dispatcher, (worker,), _ = await start(device="cuda:0")
    units = [submit(dispatcher, b"first", at=0)]
    await turns()
    units.append(submit(dispatcher, b"second", patches=60, at=1))
    await turns()
    assert marks(worker) == [[0]], "it can still be joined"
    units.append(submit(dispatcher, b"third", patches=40, at=2))
    await turns()
    assert marks(worker) == [[0], [1, 2]]
    units.append(submit(dispatcher, b"fourth", patches=100, at=3))
    await turns()
    assert marks(worker) == [[0], [1, 2]], "one ahead is enough"
    assert (len(dispatcher.running), len(dispatcher.waiting)) == (3, 1)
    worker.say(DONE)
    await turns()
    assert [unit.done.done() for unit in units] == [True, False, False, False]
    assert marks(worker) == [[0], [1, 2], [3]]
    for _ in range(2):
        worker.say(DONE)
        await turns()
    assert all(unit.done.done() for unit in units)
    assert (dispatcher.running, dispatcher.totals.vit_calls) == ([], 3)


async def test_a_batch_that_was_sent_ahead_goes_elsewhere_with_the_other_when_its_worker_dies(start):
    dispatcher, children, _ = await start(workers=2, device="cuda:0")
    units = [submit(dispatcher, bytes([at]), patches=100, at=at) for at in range(4)]
    await turns()
    assert [marks(child) for child in children] == [[[0], [2]], [[1], [3]]]
    children[0].kill()
    await turns()
    for _ in range(2):
        children[1].say(DONE)
        await turns()
    assert [unit.done.done() for unit in units] == [False, True, False, True]
    assert marks(children[2]) == [[0]]
    assert marks(children[1])[2:] == [[2]]
    for child in children[1:]:
        child.say(DONE)
    await turns()
    assert not [unit.done.exception() for unit in units if unit.done.exception()]


async def test_a_batch_that_was_sent_ahead_has_its_time_from_when_it_begins(start):
    dispatcher, (worker,), _ = await start(device="cuda:0", seconds=3600.0, patience=3600.0)
    for at in range(2):
        submit(dispatcher, bytes([at]), patches=100, at=at)
    await turns()
    (slot,) = dispatcher._workers.slots
    first = slot.timer
    assert [unit.piece.pixels for unit in slot.ahead] == [1]
    worker.say(DONE)
    await turns()
    assert first.cancelled()
    assert slot.timer.when() > first.when()
    assert slot.timer.when() - slot.began == pytest.approx(3600.0)
    worker.say(DONE)
    await turns()
    assert slot.timer is None


async def test_a_unit_can_be_withdrawn_until_a_worker_has_it(start):
    dispatcher, (worker,), _ = await start()
    first = submit(dispatcher, b"a")
    await turns()
    second = submit(dispatcher, b"b", at=1)
    assert not dispatcher.withdraw(first)
    assert dispatcher.withdraw(second)
    worker.say(DONE)
    await turns()
    assert marks(worker) == [[0]]
    assert second.done.cancelled()


async def test_the_only_worker_s_death_fails_what_it_had_and_what_waited(start):
    dispatcher, children, alive = await start()
    running = submit(dispatcher, b"a")
    await turns()
    waiting = submit(dispatcher, b"b")
    children[0].kill()
    await turns()
    for unit in (running, waiting):
        assert isinstance(unit.done.exception(), Unavailable)
        assert unit.done.exception().retry_after
    assert (len(children), dispatcher.alive, alive) == (2, 1, [1, 0, 1])
    again = submit(dispatcher, b"b")
    await turns()
    children[1].say(DONE)
    await turns()
    assert again.done.result() is None


async def test_nothing_can_be_submitted_where_no_worker_lives(start, monkeypatch):
    dispatcher, children, _ = await start()
    never = asyncio.Event()

    async def hangs(*_, **__):
        await never.wait()

    monkeypatch.setattr(Child, "start", hangs)
    children[0].kill()
    await turns()
    with pytest.raises(Unavailable):
        submit(dispatcher, b"a")


async def test_a_batch_that_takes_too_long_ends_its_worker(start):
    dispatcher, children, _ = await start(seconds=0.01)
    unit = submit(dispatcher, b"a")
    with pytest.raises(Unavailable):
        await unit.done
    assert not children[0].alive


async def computed(dispatcher: Dispatcher, worker: FakeChild, count: int) -> None:
    """Batches of ten patches that the worker answers at once."""
    for number in range(count):
        unit = submit(dispatcher, bytes([number]))
        await turns()
        worker.say(DONE)
        await unit.done


async def test_a_worker_that_takes_far_longer_than_the_batches_of_late_has_hung(start):
    dispatcher, (worker, other), _ = await start(workers=2, patience=0.01)
    other.kill = worker.kill = lambda: None
    await computed(dispatcher, worker, 8)
    killed = asyncio.Event()
    worker.kill = killed.set
    unit = submit(dispatcher, b"slow")
    await turns()
    await killed.wait()  # long before the 60 seconds that any batch may take
    assert not unit.done.done()


async def test_a_worker_that_answers_while_it_is_asked_where_it_hangs_goes_on(start):
    dispatcher, (worker, _), _ = await start(workers=2, patience=0.01)
    await computed(dispatcher, worker, 8)
    asked, told = asyncio.Event(), asyncio.Event()

    async def stacks() -> dict[str, str]:
        asked.set()
        await told.wait()
        return {"stacks": "somewhere"}

    worker.stacks = stacks
    unit = submit(dispatcher, b"slow")
    await asked.wait()
    worker.say(DONE)
    await unit.done
    told.set()
    await turns()
    assert worker.alive


async def test_no_worker_counts_as_hung_before_it_is_known_how_long_a_batch_takes(start):
    dispatcher, (worker,), _ = await start(patience=0.0)
    await computed(dispatcher, worker, 7)
    unit = submit(dispatcher, b"a")
    await turns()
    assert dispatcher._limit([unit]) == 60.0
    worker.say(DONE)
    await unit.done
    assert dispatcher._limit([unit]) < 60.0


async def test_a_unit_that_has_cost_a_worker_its_life_gets_the_whole_time(start):
    """For a second death makes it poison, and a slow machine must not do that."""
    dispatcher, (worker,), _ = await start(patience=0.0)
    await computed(dispatcher, worker, 8)  # as many as make a pace; with no patience, a ninth could be too slow
    unit = submit(dispatcher, b"a")
    assert dispatcher._limit([unit]) < 60.0
    unit.alone = True
    assert dispatcher._limit([unit]) == 60.0


async def test_the_time_to_finish_is_unknown_until_a_batch_was_computed(start):
    dispatcher, workers, _ = await start(workers=2)
    assert dispatcher.estimate() is None
    await computed(dispatcher, workers[0], 1)
    assert dispatcher.estimate() == 0
    for number in range(4):
        submit(dispatcher, bytes([number]))
    one_queue = dispatcher.estimate()
    workers[1].kill()
    await turns(1)
    assert dispatcher.alive == 1
    assert dispatcher.estimate() == pytest.approx(2 * one_queue)


async def test_the_time_to_finish_is_no_less_than_each_worker_has_computed_by_now(start, forward):
    dispatcher, workers, _ = await start(workers=2)
    await computed(dispatcher, workers[0], 1)
    submit(dispatcher, b"a")
    await turns()
    forward(5.0)
    assert dispatcher.estimate() < 5.0, "another one is idle"
    submit(dispatcher, b"b")
    await turns()
    forward(7.0)
    assert dispatcher.estimate() == 7.0


async def test_each_batch_is_reported_with_its_fill(start):
    reports: list[BatchStats] = []
    dispatcher, (worker,), _ = await start(on_batch=reports.append)
    units = [submit(dispatcher, bytes([at])) for at in range(3)]
    await turns()
    worker.say(BatchDone(not_finite=[], preprocess_seconds=0.5, vit_seconds=2.0))
    await asyncio.gather(*(unit.done for unit in units))
    assert reports == [BatchStats(units=3, patches=30, fill=0.3, preprocess_seconds=0.5, vit_seconds=2.0)]


async def test_workers_are_busy_while_they_have_a_batch_whether_another_is_got_ready_or_not(start, monkeypatch):
    """The device does nothing more while what follows is got ready beside it."""
    dispatcher, workers, _ = await start(workers=2, device="cuda:0")
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    for at in range(3):
        submit(dispatcher, bytes([at]), patches=100, at=at)
    await turns()
    assert [marks(worker) for worker in workers] == [[[0], [2]], [[1]]]
    now += 8.0
    assert dispatcher.busy_seconds == 16.0, "batches under way count as far as they are"
    workers[1].say(DONE)
    await turns()
    now += 4.0
    assert dispatcher.busy_seconds == 20.0, "one has nothing to do"
    workers[0].say(BatchDone(not_finite=[], preprocess_seconds=11.0, vit_seconds=12.0))
    await turns()
    now += 2.0
    assert dispatcher.busy_seconds == 22.0, "the batch that was ready has begun"
    workers[0].kill()
    await turns()
    workers[1].say(DONE)
    await turns()
    now += 32.0
    assert dispatcher.busy_seconds == 22.0, "who died has nothing, and who took over did it in no time"


async def test_a_worker_is_not_hung_where_its_service_stood_still(start):
    """What it has answered meanwhile is read after the time is up."""
    dispatcher, (worker,), _ = await start(seconds=0.1, stall=0.0)
    unit = submit(dispatcher, b"a")
    await turns()
    loop = asyncio.get_running_loop()

    def stand_still() -> None:
        time.sleep(0.2)
        loop.call_soon(worker.say, DONE)

    loop.call_soon(stand_still)
    await asyncio.wait([unit.done])
    assert worker.alive
    assert unit.done.exception() is None


async def test_how_a_worker_ended_that_was_not_ready_is_told(monkeypatch):
    class Killed(FakeChild):
        def send(self, message):
            self.kill()

        async def post_mortem(self) -> dict[str, str]:
            return {"status": "killed by SIGKILL"}

    async def child(*_, **__) -> FakeChild:
        return Killed()

    monkeypatch.setattr(Child, "start", child)
    dispatcher = Dispatcher([SETTINGS], (0, 0), LIMITS, TIMES)
    with pytest.raises(WorkerError, match=r"^a worker ended before it was ready: killed by SIGKILL$"):
        await dispatcher.start()


async def test_a_worker_that_cannot_start_says_why(monkeypatch):
    class Unwilling(FakeChild):
        def send(self, message):
            self.say(StartFailed(why="no such device"))

    async def child(*_, **__) -> FakeChild:
        return Unwilling()

    monkeypatch.setattr(Child, "start", child)
    dispatcher = Dispatcher([SETTINGS], (0, 0), LIMITS, TIMES)
    with pytest.raises(WorkerError, match="no such device"):
        await dispatcher.start()
    await dispatcher.stop()


class Mute(FakeChild):
    """A worker that is told how to begin, and says nothing."""

    def send(self, message):
        self.batches.append(message)


async def test_a_worker_that_hangs_at_the_start_is_ended(monkeypatch):
    worker = Mute()

    async def child(*_, **__) -> FakeChild:
        return worker

    monkeypatch.setattr(Child, "start", child)
    dispatcher = Dispatcher([SETTINGS], (0, 0), LIMITS, WorkerTimes(0.01))
    with pytest.raises(WorkerError, match=r"within 0\.01 seconds"):
        await dispatcher.start()
    assert not worker.alive
    await dispatcher.stop()


async def test_a_replacement_that_hangs_at_its_start_is_replaced_in_turn(start, monkeypatch):
    _, children, alive = await start(start=0.01, longest_pause=0.0)
    fakes, started = [Mute(), FakeChild()], asyncio.Event()

    async def child(*_, **__) -> FakeChild:
        children.append(fakes.pop(0))
        if not fakes:
            started.set()
        return children[-1]

    monkeypatch.setattr(Child, "start", child)
    children[0].kill()
    async with asyncio.timeout(180):
        await started.wait()
    await turns()
    assert [each.alive for each in children] == [False, False, True]
    assert alive == [1, 0, 1]


async def test_stopping_fails_what_is_left(start):
    dispatcher, _, _ = await start()
    running = submit(dispatcher, b"a")
    await turns()
    waiting = submit(dispatcher, b"b")
    await dispatcher.stop()
    assert all(isinstance(unit.done.exception(), Unavailable) for unit in (running, waiting))


@pytest.mark.parametrize("where", ["pump", "reply", "death"])
async def test_a_defect_of_the_dispatcher_ends_the_process_instead_of_leaving_items_waiting(start, monkeypatch, where):
    died: list[str] = []

    def defect(*_: object) -> None:
        raise KeyError("a name without its import")

    dispatcher, (worker,), _ = await start(die=lambda: died.append(where))
    if where == "pump":
        monkeypatch.setattr(dispatch, "assemble", defect)
    submit(dispatcher, b"a")
    await turns()
    if where == "reply":
        monkeypatch.setattr(dispatcher, "_count", defect)
        worker.say(DONE)
    elif where == "death":
        monkeypatch.setattr(dispatcher, "_on_change", defect)
        worker.kill()
    await turns()
    assert died == [where]
