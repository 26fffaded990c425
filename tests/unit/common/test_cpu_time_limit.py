"""Another process's time: used up, never had, or still running, with real processes that spin, sleep or are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.process import cpu_time_limit as module
from common.process.cpu_time_limit import CpuTimeLimit, ProcessStalled
from common.process.status import cpu_seconds, was_ended
from tests.waiting import until

SPIN = "print('go', flush=True)\nwhile True: pass"
SLEEP = "import time\nprint('go', flush=True)\ntime.sleep(600)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(processes: list[subprocess.Popen[str]], code: str) -> int:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    return process.pid


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_process_that_uses_up_its_time_is_too_slow(started: list[subprocess.Popen[str]]) -> None:
    pid = start(started, SPIN)
    before = cpu_seconds(pid)
    assert before is not None
    with pytest.raises(TimeoutError):
        async with CpuTimeLimit(pid, 0.3):
            await forever()
    after = cpu_seconds(pid)
    assert after is not None
    assert after - before >= 0.3


@pytest.mark.parametrize("code", [SPIN, SLEEP])
async def test_a_process_that_does_nothing_stands_still(started: list[subprocess.Popen[str]], code: str) -> None:
    pid = start(started, code)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ProcessStalled):
        async with CpuTimeLimit(pid, 30.0, still=0.2):
            await forever()


async def test_one_that_sleeps_stands_still_and_is_not_too_slow(started: list[subprocess.Popen[str]]) -> None:
    with pytest.raises(ProcessStalled):
        async with CpuTimeLimit(start(started, SLEEP), 0.2):
            await forever()


async def test_one_that_is_held_up_is_waited_for(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process stands for one that never gets a core; as long as the kernel says that it would go on."""
    pid = start(started, SPIN)
    os.kill(pid, signal.SIGSTOP)
    looks = 0

    def held_up(_: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            os.kill(pid, signal.SIGCONT)
        return True

    monkeypatch.setattr(module, "is_held_up", held_up)
    with pytest.raises(TimeoutError):
        async with CpuTimeLimit(pid, 0.1):
            await forever()
    assert looks >= 5


async def test_a_process_that_is_gone_is_left_to_whoever_listens_to_it(started: list[subprocess.Popen[str]]) -> None:
    pid = start(started, SPIN)
    started[0].kill()
    started[0].wait()
    done = asyncio.get_running_loop().create_future()
    async with CpuTimeLimit(pid, 0.02) as limit:
        verdict = limit._verdict
        seen = []

        def noted() -> Exception | None:
            seen.append(verdict())
            if len(seen) == 5:
                done.set_result(None)
            return seen[-1]

        limit._verdict = noted  # type: ignore[method-assign]
        await done
    assert seen == [None] * 5


async def test_work_that_is_passed_on_is_measured_anew(started: list[subprocess.Popen[str]]) -> None:
    async def passed_on(first: int, second: int) -> None:
        async with CpuTimeLimit(first, 0.2) as limit:
            limit.passed_to(second)
            await forever()

    with pytest.raises(TimeoutError):
        await passed_on(start(started, SLEEP), start(started, SPIN))


def test_the_processor_time_of_one_that_has_ended_is_not_known(started: list[subprocess.Popen[str]]) -> None:
    pid = start(started, SPIN)
    assert cpu_seconds(pid) is not None
    started[0].kill()
    until(lambda: cpu_seconds(pid) is None, "it is dead, and nobody has asked how it died")
    started[0].wait()
    assert cpu_seconds(pid) is None


@pytest.mark.parametrize(
    ("status", "ended"),
    [(0, False), (1, False), (-signal.SIGSEGV, False), (-signal.SIGABRT, False), (-signal.SIGKILL, True), (None, True)],
)
def test_what_a_process_did_itself_is_told_from_what_was_done_to_it(status: int | None, ended: bool) -> None:
    assert was_ended(status) is ended
