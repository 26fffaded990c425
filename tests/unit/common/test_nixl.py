"""A NIXL agent: what it reads, and what becomes of reads when it, or the other one, ends or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from common.nixl.__main__ import _let_sleep, _library
from common.nixl.agent import MODULE, NixlAgent, NixlError
from common.nixl.messages import AgentMemory
from common.shm.arena import SharedBuffer
from tests.launch import stop
from tests.nixl_agents import SIZE, TWIN, Held, held, needs_library, processes
from tests.waiting import eventually

MODULES = [TWIN, pytest.param(MODULE, marks=needs_library)]


@pytest.mark.parametrize("module", MODULES)
async def test_bytes_are_read_from_where_they_are_to_where_they_are_wanted(module: str) -> None:
    async with held(module=module, fill=7) as theirs, held(module=module) as ours:
        theirs.buffer.view[1000:1004] = b"rows"
        await ours.agent.connect(theirs.memory)
        await asyncio.gather(
            asyncio.shield(ours.agent.read(theirs.memory, 1000, 50, 4)),
            asyncio.shield(ours.agent.read(theirs.memory, SIZE - 10, 60, 10)),
        )
        assert ours.bytes(48, 24) == b"\0\0rows\0\0\0\0\0\0" + b"\7" * 10 + b"\0\0"
        assert theirs.bytes(1000, 4) == b"rows"
    assert processes() == []
    assert ours.agent.memory is None


async def test_an_agent_that_is_not_connected_or_has_another_back_end_is_not_read() -> None:
    async with held(fill=7) as theirs, held() as ours, held("SPOILS") as other:
        with pytest.raises(NixlError, match="not connected"):
            await ours.agent.read(theirs.memory, 0, 0, 8)
        with pytest.raises(NixlError, match="back end is SPOILS, and ours UCX"):
            await ours.agent.connect(other.memory)
        await ours.agent.connect(theirs.memory)
        ours.agent.disconnect(theirs.memory.agent)
        with pytest.raises(NixlError, match="not connected"):
            await ours.agent.read(theirs.memory, 0, 0, 8)
        assert ours.bytes(0, 8) == bytes(8)


async def test_what_the_library_cannot_do_is_told_at_the_start() -> None:
    buffer = SharedBuffer.create("test", SIZE)
    for backend, module, why in (("NONE", TWIN, "no such back end"), ("UCX", "tests.no_such_module", "has ended")):
        agent = NixlAgent(buffer, backend, module=module)
        with pytest.raises(NixlError, match=why):
            await agent.start()
        await agent.stop()
        assert agent.memory is None
    buffer.close()
    assert processes() == []


@needs_library
async def test_a_back_end_that_the_library_lacks_is_told_at_the_start() -> None:
    with pytest.raises(NixlError, match="NIXL has no back end NOTHING here"):
        async with held("NOTHING", module=MODULE):
            pass
    assert processes() == []


@pytest.mark.parametrize("module", MODULES)
async def test_reads_of_a_process_that_ends_fail_and_another_agent_takes_its_place(module: str) -> None:
    async with held(module=module, fill=7) as theirs, held(module=module) as ours:
        before, known = ours.memory, set(processes())
        await ours.agent.connect(theirs.memory)
        child = ours.agent._child
        assert child is not None
        stop(child.process.pid)
        read = ours.agent.read(theirs.memory, 0, 0, 8)
        child.kill()
        with pytest.raises(NixlError, match="its process has ended"):
            await asyncio.shield(read)
        assert not ours.agent.is_connected(theirs.memory.agent)
        await eventually(lambda: ours.agent.memory, "another agent is there")
        assert ours.memory.agent != before.agent
        assert set(processes()) != known
        await ours.agent.connect(theirs.memory)
        await asyncio.shield(ours.agent.read(theirs.memory, 0, 0, 8))
        assert ours.bytes(0, 8) == b"\7" * 8


async def test_a_read_that_does_not_end_ends_the_process_before_it_ends() -> None:
    """When its future ends, nobody writes there any more."""
    async with held(fill=7) as theirs, held("HANGS") as ours:
        memory = AgentMemory(**{**_fields(theirs.memory), "backend": "HANGS"})
        child = ours.agent._child
        assert child is not None
        await ours.agent.connect(memory)
        ours.agent._answer_seconds = 0.05
        with pytest.raises(NixlError, match="its process has ended"):
            await asyncio.shield(ours.agent.read(memory, 0, 0, 8))
        assert child.process.returncode is not None


@needs_library
async def test_a_host_that_stands_still_is_given_up_and_nothing_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """By TCP, as between hosts. What the library calls released would still be written, once the other goes on."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with held(module=MODULE, fill=7) as theirs, held(module=MODULE) as ours:
        await ours.agent.connect(theirs.memory)
        await asyncio.shield(ours.agent.read(theirs.memory, 0, 0, 8))
        ours.agent._answer_seconds, patient = 1.0, ours.agent._answer_seconds
        child = theirs.agent._child
        assert child is not None
        stop(child.process.pid)
        try:
            with pytest.raises(NixlError, match="its process has ended"):
                await asyncio.shield(ours.agent.read(theirs.memory, 0, 8, SIZE - 8))
            landed = ours.bytes(8, SIZE - 8)  # some of it, where it stood still a moment after it was told to
        finally:
            os.kill(child.process.pid, signal.SIGCONT)
        ours.agent._answer_seconds = patient
        while not await _read(ours, theirs, 4):  # the library may end their process, now that it hears of this
            await eventually(lambda: ours.agent.memory and theirs.agent.memory, "both have an agent")
        assert ours.bytes(0, 8) == b"\7" * 8
        assert ours.bytes(8, SIZE - 8) == landed


@needs_library
async def test_nothing_comes_after_the_end_of_a_read_whose_agent_was_let_go_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library would say at once that it has ended, and write when the other one goes on."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with held(module=MODULE, fill=7) as theirs, held(module=MODULE) as ours:
        await ours.agent.connect(theirs.memory)
        await asyncio.shield(ours.agent.read(theirs.memory, 0, 0, 8))
        child = theirs.agent._child
        assert child is not None
        stop(child.process.pid)
        read = ours.agent.read(theirs.memory, 0, 8, SIZE - 8)
        ours.agent.disconnect(theirs.memory.agent)
        os.kill(child.process.pid, signal.SIGCONT)
        await asyncio.shield(read)
        assert ours.bytes(0, SIZE) == b"\7" * SIZE
        with pytest.raises(NixlError, match="not connected"):
            await ours.agent.read(theirs.memory, 0, 0, 8)


async def test_a_process_that_says_nothing_more_is_gone_when_its_agent_has_been_stopped() -> None:
    """Stopped while it is being found out how that process ended, which it has not."""
    async with held() as ours:
        child = ours.agent._child
        assert child is not None
        child._reader.feed_eof()
        await eventually(lambda: ours.agent.memory is None, "its silence is noticed")
        await ours.agent.stop()
        assert child.process.returncode is not None
        assert child._writer.is_closing()


async def test_an_agent_that_nobody_waits_to_be_connected_with_is_let_go() -> None:
    async with held(fill=7) as theirs, held() as ours:
        child = ours.agent._child
        assert child is not None
        stop(child.process.pid)
        connecting = asyncio.create_task(ours.agent.connect(theirs.memory))
        await eventually(lambda: ours.agent._asked, "it is asked for")
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        os.kill(child.process.pid, signal.SIGCONT)
        ours.agent._connected.add(theirs.memory.agent)  # as nobody would say
        with pytest.raises(NixlError, match="nobody has that name"):
            await asyncio.shield(ours.agent.read(theirs.memory, 0, 0, 8))


async def test_an_agent_is_let_go_when_its_reads_have_ended_unless_it_is_wanted_again() -> None:
    async with held(fill=7) as theirs, held() as ours:
        name = theirs.memory.agent
        for again in (False, True):
            await ours.agent.connect(theirs.memory)
            reads = [ours.agent.read(theirs.memory, 0, at, 8) for at in (0, 8)]
            ours.agent.disconnect(name)
            assert ours.agent._leaving == {name}
            if again:
                await ours.agent.connect(theirs.memory)
            await asyncio.gather(*map(asyncio.shield, reads))
            await eventually(lambda: not ours.agent._reading, "the reads have ended")
            assert not ours.agent._leaving
        await asyncio.shield(ours.agent.read(theirs.memory, 0, 16, 8))
        assert ours.bytes(0, 24) == b"\7" * 24


@needs_library
async def test_of_a_process_that_is_killed_reads_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with held(module=MODULE, fill=7) as theirs, held(module=MODULE) as ours:
        await ours.agent.connect(theirs.memory)
        await asyncio.shield(ours.agent.read(theirs.memory, 0, 0, 8))
        gone, child = theirs.memory, theirs.agent._child
        assert child is not None
        child.kill()
        await eventually(lambda: theirs.agent.memory not in (None, gone), "another agent is there")
        with pytest.raises(NixlError):
            await asyncio.shield(ours.agent.read(gone, 0, 0, 8))
        ours.agent.disconnect(gone.agent)
        await ours.agent.connect(theirs.memory)
        await asyncio.shield(ours.agent.read(theirs.memory, 0, 0, 8))


@needs_library
def test_an_agent_sleeps_until_something_comes() -> None:
    """Else its library looks for work without a pause, on a core of its own."""
    bindings = SimpleNamespace(nixlAgentConfig=_library().nixlBind.nixlAgentConfig)
    _let_sleep(bindings)
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    config.useProgThread = True
    assert (config.pthrDelay, config.useProgThread) == (10_000, True)


async def _read(ours: Held, theirs: Held, size: int) -> bool:
    """Reads their first bytes; False where either agent ends meanwhile."""
    if theirs.agent.memory is None:
        return False
    memory = theirs.memory
    try:
        await ours.agent.connect(memory)
        await asyncio.shield(ours.agent.read(memory, 0, 0, size))
    except NixlError:
        return False
    return True


def _fields(memory: AgentMemory) -> dict[str, object]:
    return {name: getattr(memory, name) for name in memory.__struct_fields__}
