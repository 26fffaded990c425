"""Child processes: words both ways, and no end that goes unnoticed or leaves anyone behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from common.aio import tasks
from common.process.children import Child, ChildDied, ChildProcess
from common.process.stacks import Stacks
from common.process.status import is_held_up, is_stopped
from common.shm.arena import SharedBuffer
from tests.launch import ROOT, command_line, descendants
from tests.unit.common.echo_child import Do, Say
from tests.waiting import eventually, until

MODULE = "tests.unit.common.echo_child"


@pytest.fixture
async def child() -> AsyncIterator[Child[Say]]:
    child: Child[Say] = await Child.start(MODULE, receives=Say)
    yield child
    await child.stop()
    assert child.process.returncode is not None


async def test_messages_of_any_size_go_both_ways_in_order(child: Child[Say]) -> None:
    said = [bytes([n]) * size for n, size in enumerate((0, 1, 5, 70_000, 3 << 20, 2))]
    for words in said:
        child.send(Say(words))
    assert [(await child.receive()).words for _ in said] == said


async def test_a_child_that_hangs_tells_where_before_it_is_killed() -> None:
    child: Child[Say] = await Child.start(MODULE, receives=Say, stacks=True)
    child.send(Do("hang"))
    assert (await child.receive()).words == b"hanging"
    found = await child.post_mortem()
    assert "in main" in found["stacks"]
    with pytest.raises(ChildDied):
        await child.receive()
    await child.stop()
    assert child.process.returncode == -signal.SIGKILL


async def test_a_child_that_has_ended_is_told_of_by_how_it_did() -> None:
    for how, status in ((Do("exit"), "exit status 0"), (None, "killed by SIGTERM")):
        child: Child[Say] = await Child.start(MODULE, receives=Say, stacks=True)
        child.send(Say(b"hello"))
        await child.receive()
        if how is None:
            child.process.send_signal(signal.SIGTERM)
        else:
            child.send(how)
        with pytest.raises(ChildDied):
            await child.receive()
        assert await child.post_mortem() == {"status": status}
        await child.stop()


async def test_a_child_that_ends_while_its_parent_stands_still_is_told_of_by_how_it_did() -> None:
    child: Child[Say] = await Child.start(MODULE, receives=Say, stacks=True)
    child.send(Do("hang"))
    await child.receive()
    telling = asyncio.create_task(child._status())
    await asyncio.sleep(0)
    child.kill()
    time.sleep(1.2)  # noqa: ASYNC251
    assert await telling == {"status": "killed by SIGKILL"}
    await child.stop()


async def test_a_child_that_is_stopped_or_tells_no_stacks_is_killed_all_the_same() -> None:
    for stacks in (True, False):
        child: Child[Say] = await Child.start(MODULE, receives=Say, stacks=stacks)
        child.send(Say(b"hello"))
        await child.receive()
        if stacks:
            child.process.send_signal(signal.SIGSTOP)
            until(lambda pid=child.process.pid: is_stopped(pid), "it is stopped")
        assert await child.post_mortem() == {}
        await child.stop()
        assert child.process.returncode == -signal.SIGKILL


async def test_a_child_that_is_asked_again_tells_where_it_is_then() -> None:
    stacks = Stacks()
    for said in ("in one place", "in another"):
        assert await stacks.read(lambda _, said=said: os.write(stacks.fd, said.encode())) == said
    stacks.close()


async def test_a_child_that_ends_while_it_is_asked_where_it_hangs_tells_nothing() -> None:
    child: Child[Say] = await Child.start(MODULE, receives=Say, stacks=True)
    child.send(Do("hang"))
    await child.receive()
    asked = asyncio.ensure_future(child.stacks())
    await asyncio.sleep(0)
    await child.stop(grace=0.0)
    assert await asked == {}


async def test_shared_memory_is_seen_by_both() -> None:
    buffer = SharedBuffer.create("test-child", 4096)
    child: Child[Say] = await Child.start(MODULE, receives=Say, fds=(buffer.fd,))
    child.send(Do("write"))
    assert (await child.receive()).words == b"written"
    assert bytes(buffer.view[:5]) == b"hello"
    await child.stop()
    buffer.close()


async def test_a_process_that_nobody_waits_for_any_more_is_gone() -> None:
    before = set(descendants(os.getpid()))
    starting = asyncio.ensure_future(Child.start(MODULE, receives=Say))
    await asyncio.sleep(0)
    assert len(set(descendants(os.getpid())) - before) == 1
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled()
    assert set(descendants(os.getpid())) <= before


def environment(child: Child[Say]) -> bytes:
    return Path(f"/proc/{child.process.pid}/environ").read_bytes()


@pytest.mark.parametrize("exposed", [False, True])
async def test_a_process_that_strangers_can_reach_has_no_secret(monkeypatch: pytest.MonkeyPatch, exposed: bool) -> None:
    monkeypatch.setenv("TWINLENS_ENCODER_AUTH_TOKEN", "open sesame")
    child: Child[Say] = await Child.start(MODULE, receives=Say, exposed=exposed)
    child.send(Say(b"up"))
    await child.receive()
    given = environment(child)
    assert (b"open sesame" in given) is not exposed
    assert b"PATH=" in given
    await child.stop()


@pytest.mark.parametrize("how", ["killed", "ends by itself", "babbles"])
async def test_the_end_of_a_child_is_told_to_whoever_receives(child: Child[Say], how: str) -> None:
    child.send(Say(b"up"))
    await child.receive()
    if how == "killed":
        child.kill()
    else:
        child.send(Do("exit" if how == "ends by itself" else "babble"))
    with pytest.raises(ChildDied):
        await child.receive()
    child.send(Say(b"into the void"))


async def test_a_child_ends_when_its_socket_is_closed(child: Child[Say]) -> None:
    child.send(Say(b"up"))
    await child.receive()
    await child.stop()
    assert child.process.returncode == 0


async def test_a_child_that_does_not_end_is_killed_after_the_grace_time(child: Child[Say]) -> None:
    child.send(Do("hang"))
    await child.receive()
    await child.stop(grace=0.1)
    assert child.process.returncode == -signal.SIGKILL


async def test_a_child_does_not_outlive_a_parent_that_was_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULE, "--parent", stdout=subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert MODULE in command_line(child)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not command_line(child), "the child is gone")


@pytest.mark.parametrize("error", [None, RuntimeError("can't start new thread")])
async def test_the_end_of_a_process_is_noticed_though_no_thread_can_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """It could not begin, or it began and there was no memory for its first line."""
    thread: Future[int] = Future()
    thread.set_running_or_notify_cancel()
    if error is not None:
        thread.set_exception(error)
    monkeypatch.setattr(tasks, "in_daemon_thread", lambda _: thread)
    process = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"], {}, ())
    assert process.returncode is None
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    short = ChildProcess(["/bin/true"], {}, ())
    assert await short.wait() == 0


def test_a_process_that_would_go_on_if_it_could_is_told_from_one_that_is_stopped_waits_or_has_ended() -> None:
    spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        until(lambda: not is_held_up(waits.pid), "it waits for its input")
        until(lambda: is_held_up(spins.pid), "it has started")
        spins.send_signal(signal.SIGSTOP)
        until(lambda: not is_held_up(spins.pid), "it is stopped")
        spins.send_signal(signal.SIGCONT)
        until(lambda: is_held_up(spins.pid), "it goes on")
    finally:
        for process in (spins, waits):
            process.kill()
            process.communicate()
    assert not is_held_up(spins.pid)


async def test_a_child_that_cannot_start_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    before = _descriptors()
    with pytest.raises(FileNotFoundError) as failure:
        await Child.start(MODULE, receives=Say)
    assert _descriptors() <= before, failure.value


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
