"""Decode processes that do not start: who wants one is told, none is kept, and another is tried."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from common.errors import Unavailable
from common.process.children import Child, ChildDied
from common.shm.arena import SharedBuffer
from encoder_service.media.limits import MediaLimits
from encoder_service.media.messages import DecoderSettings
from encoder_service.media.processes import DecodeProcesses
from tests.unit.encoder_service.fakes import turns


@asynccontextmanager
async def one(**options):
    """A process that is yet to be started, or what takes its place."""
    arena = SharedBuffer.create("test", 1 << 16)
    settings = DecoderSettings(
        staging_bytes=arena.size, memory_bytes=2 << 30, threads=1, bounds=MediaLimits().bounds, decoders=[]
    )
    made = DecodeProcesses(arena.fd, settings, 1, **{"start_seconds": 600.0, "on_change": lambda: None, **options})
    try:
        yield made
    finally:
        await made.stop()
        arena.close()


def starts_another(monkeypatch, module: str) -> None:
    """From now on a process is one of this module, which may be none."""
    start = Child.start
    monkeypatch.setattr(Child, "start", lambda _, **given: start(module, **given))


async def test_where_no_process_can_be_started_jobs_are_told_at_once_until_one_can(monkeypatch):
    able = asyncio.Event()

    def changed() -> None:
        able.set() if processes.able else able.clear()

    async with one(longest_pause=0.0, on_change=changed) as processes:
        await processes.start()
        with monkeypatch.context() as patched:
            starts_another(patched, "encoder_service.no_such_module")
            (child,) = processes.children
            child.kill()
            await child.process.wait()
            async with asyncio.timeout(180):
                while not child.has_ended:
                    await turns(1)
            found = await asyncio.gather(*(processes.take(b"x") for _ in range(3)), return_exceptions=True)
            assert [type(each) for each in found] == [Unavailable] * 3
            assert {each.reason for each in found} == {"NO_DECODER"}
            assert not processes.able
            late = asyncio.create_task(processes.take(b"x"))
            await turns(1)
            assert late.done()
            assert isinstance(late.exception(), Unavailable)
        async with asyncio.timeout(180):
            await able.wait()
        processes.put(await processes.take(b"x"))


async def test_a_process_that_hangs_at_its_start_is_ended(monkeypatch):
    started, start = [], Child.start

    async def frozen(*args, **options):
        started.append(await start(*args, **options))
        os.kill(started[0].process.pid, signal.SIGSTOP)
        return started[0]

    monkeypatch.setattr(Child, "start", frozen)
    async with one(start_seconds=0.05) as processes:
        with pytest.raises(ChildDied, match=r"within 0\.05 seconds"):
            await processes.start()
        assert started[0].process.returncode is not None
        assert not processes.children


async def test_a_process_that_does_not_start_is_not_kept(monkeypatch):
    starts_another(monkeypatch, "encoder_service.no_such_module")
    async with one() as processes:
        with pytest.raises(ChildDied):
            await processes.start()
        assert not processes.children
