"""Work that holds memory which is lent to it: nobody leaves before it has ended. And work that nobody can wait for."""

from __future__ import annotations

import _thread
import asyncio
import subprocess
import sys
import threading

import pytest

from common.aio import tasks
from common.aio.tasks import EXIT_DEFECT, in_daemon_thread, in_thread, start_vital, wait_until_done
from tests.waiting import until


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_whoever_is_cancelled_again_and_again_waits_for_the_thread():
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    caller = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    try:
        for _ in range(3):
            caller.cancel()
            await turns()
            assert not caller.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_thread_s_result_and_its_error_come_back():
    assert await in_thread(int, "7") == 7
    with pytest.raises(ValueError, match="seven"):
        await in_thread(int, "seven")


async def test_work_that_is_cancelled_itself_is_over():
    work = asyncio.create_task(asyncio.Event().wait())
    await turns()
    work.cancel()
    await wait_until_done(work)
    assert work.cancelled()


def test_what_a_daemon_thread_made_or_raised_comes_back():
    assert in_daemon_thread(int, "7").result(180) == 7
    with pytest.raises(ValueError, match="seven"):
        in_daemon_thread(int, "seven").result(180)


def test_where_no_thread_can_be_had_the_result_says_so(monkeypatch):
    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    with pytest.raises(RuntimeError, match="new thread"):
        in_daemon_thread(int, "7").result(180)


async def test_threads_that_were_started_need_no_other(monkeypatch):
    monkeypatch.setattr(tasks._Threads, "pool", None)
    tasks.start_threads()

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", start)
    found = await asyncio.gather(*(tasks.to_thread(int, str(number)) for number in range(100)))
    assert found == list(range(100))


async def test_where_too_few_threads_can_be_had_none_is_left(monkeypatch):
    before, started, begin = threading.active_count(), [], threading._start_new_thread

    def start(*given: object) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(begin(*given))

    monkeypatch.setattr(threading, "_start_new_thread", start)
    with pytest.raises(OSError, match="not even"):
        tasks.start_threads()
    until(lambda: threading.active_count() <= before, "they have ended")


async def test_who_leaves_does_not_take_a_daemon_thread_s_work_back():
    go_on = threading.Event()
    working = in_daemon_thread(go_on.wait, 60)
    waiting = asyncio.wrap_future(working)
    waiting.cancel()
    await turns()
    assert not working.cancelled()
    go_on.set()
    assert working.result(180)


_DEFECT = """
import asyncio
from common.telemetry import log
from common.aio import tasks

async def main():
    async def defect():
        raise KeyError("where")
    tasks.start_vital(defect(), "keeper")
    await asyncio.Event().wait()

log.configure("info", service="test")
asyncio.run(main())
"""


def test_a_defect_of_a_task_that_nothing_is_served_without_ends_the_process_and_says_why():
    ended = subprocess.run([sys.executable, "-c", _DEFECT], check=False, capture_output=True, text=True, timeout=180)
    assert ended.returncode == EXIT_DEFECT
    assert "a task failed" in ended.stderr
    assert "KeyError" in ended.stderr


async def test_a_vital_task_that_ends_well_or_is_cancelled_ends_nothing():
    async def work(forever: bool) -> None:
        await (asyncio.Event().wait() if forever else asyncio.sleep(0))

    died: list[bool] = []
    well, cancelled = (start_vital(work(forever), "work", lambda: died.append(True)) for forever in (False, True))
    await well
    cancelled.cancel()
    await turns()
    assert cancelled.cancelled()
    assert not died
