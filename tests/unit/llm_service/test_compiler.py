"""Structures are compiled in processes that are ended when time is over, in turns of those who ask, and each answer is
remembered; what nobody can help is told from what a structure does."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import Exhausted, InvalidInput, Unavailable
from common.process.children import Child
from common.process.cpu_time_limit import CpuTimeLimit
from llm_service.grammar.compiler import Compiler
from llm_service.grammar.messages import Compile, StructureLimits, Vocabulary
from llm_service.request import Structure
from testkit.checkpoints import VOCABULARY
from tests.launch import command_line
from tests.waiting import eventually, until

pytestmark = pytest.mark.usefixtures("forked_children")

BLIND = StructureLimits(multiple=1 << 60, repeats=1 << 60, depth=1 << 60, compiled_bytes=1 << 40)
"""Under these everything is tried."""
EXPLODING = Structure("json_schema", json.dumps({"type": "integer", "multipleOf": 99_999_989}))
GOOD = Structure("regex", "a+")


@asynccontextmanager
async def compiling(folder: Path, **given: Any) -> AsyncIterator[Compiler]:
    made = Compiler(Vocabulary(str(folder), VOCABULARY, [0]), **{"limits": BLIND, "seconds": 0.5, **given})
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3_vl")


@pytest.fixture
async def compiler(folder: Path) -> AsyncIterator[Compiler]:
    async with compiling(folder) as made:
        yield made


async def refusal(compiler: Compiler, structure: Structure) -> InvalidInput:
    with pytest.raises(InvalidInput) as error:
        await compiler.grammar(structure)
    return error.value


async def test_a_structure_becomes_a_grammar(compiler: Compiler) -> None:
    made = await compiler.grammar(GOOD)
    assert json.loads(made.grammar)
    assert 1 << 10 < made.bytes < 1 << 17


async def test_one_that_makes_no_sense_is_refused_by_its_field(compiler: Compiler) -> None:
    error = await refusal(compiler, Structure("regex", "(("))
    assert (error.reason, error.field) == ("BAD_STRUCTURE", "sampling.regex")


async def test_one_that_takes_too_long_is_refused_and_costs_no_process(compiler: Compiler) -> None:
    refused, grammar = await asyncio.gather(refusal(compiler, EXPLODING), compiler.grammar(GOOD))
    assert "too long" in refused.message
    assert grammar
    before = pids(compiler)
    assert await compiler.grammar(Structure("regex", "b+"))
    assert pids(compiler) == before


async def test_one_that_takes_too_much_memory_is_refused_and_costs_no_process(folder: Path) -> None:
    async with compiling(folder, seconds=60.0) as compiler:
        await compiler.grammar(GOOD)
        await asyncio.gather(*compiler._tasks)
        before = pids(compiler)
        for pid in before:
            limit = mapped(pid) + (8 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        refused = await refusal(compiler, Structure("json_schema", '{"type": "integer", "multipleOf": 99991}'))
        assert refused.reason == "BAD_STRUCTURE"
        assert "too much memory" in refused.message
        assert pids(compiler) == before


async def test_one_whose_compiled_form_is_too_large_is_refused(folder: Path) -> None:
    limits = StructureLimits(multiple=1 << 60, repeats=1 << 60, depth=128, compiled_bytes=1 << 20)
    async with compiling(folder, limits=limits) as compiler:
        assert await compiler.grammar(Structure("json_schema", '{"type": "integer", "multipleOf": 97}'))
        refused = await refusal(compiler, Structure("json_schema", '{"type": "integer", "multipleOf": 4999}'))
    assert refused.reason == "STRUCTURE_TOO_LARGE"
    assert str(1 << 20) in refused.message


async def test_what_is_foreseen_is_refused_without_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "start", None)
    limits = StructureLimits(multiple=10_000, repeats=1 << 16, depth=128, compiled_bytes=1 << 25)
    async with compiling(folder, limits=limits) as compiler:
        for structure in (EXPLODING, Structure("regex", "a{1000000}"), Structure("regex", "(" * 5000)):
            refused = await refusal(compiler, structure)
            assert (refused.reason, refused.field) == ("STRUCTURE_TOO_LARGE", f"sampling.{structure.kind}")
            assert any(str(limit) in refused.message for limit in (10_000, 1 << 16, 128))


async def test_a_refusal_is_remembered_for_its_tenant(compiler: Compiler) -> None:
    first = await refusal(compiler, EXPLODING)
    coming = asyncio.create_task(refusal(compiler, EXPLODING))
    await asyncio.sleep(0)  # one turn of the loop: no process was asked
    assert coming.done()
    assert coming.result().message == first.message


async def test_no_tenant_is_told_sooner_what_another_has_asked_for(compiler: Compiler) -> None:
    await compiler.grammar(GOOD, "one")
    others = asyncio.create_task(compiler.grammar(GOOD, "other"))
    again = asyncio.create_task(compiler.grammar(GOOD, "one"))
    await asyncio.sleep(0)
    assert (others.done(), again.done()) == (False, True)
    assert (await others).grammar == (await again).grammar


async def test_a_refusal_for_time_alone_does_not_last(folder: Path) -> None:
    """It may still have been the machine."""
    slow = Structure("json_schema", '{"type": "integer", "multipleOf": 29989}')
    async with compiling(folder, seconds=0.0, doubt_seconds=0.01) as compiler:
        assert "too long" in (await refusal(compiler, slow)).message
        await eventually(lambda: ("", slow) not in compiler._known, "it is forgotten")
        assert not compiler._known_bytes
        compiler._seconds = 30.0
        assert await compiler.grammar(slow)


async def test_no_more_bytes_of_answers_are_remembered_than_the_bound(folder: Path) -> None:
    async with compiling(folder, remembered_bytes=4000) as compiler:
        asked = [Structure("regex", f"{letter * 500}+") for letter in "abcdef"]
        for structure in asked:
            await compiler.grammar(structure)
            assert compiler._known_bytes <= 4000
        assert list(compiler._known) == [("", structure) for structure in asked[-3:]]
        assert await compiler.grammar(asked[0]), "one that was forgotten is compiled again"
        for structure in asked:
            compiler._forget(("", structure))
        assert (compiler._known_bytes, len(compiler._known)) == (0, 0)


async def test_a_caller_who_leaves_leaves_no_answer_for_the_next(compiler: Compiler) -> None:
    for pattern in ("x+", "y+", "z+"):
        leaving = asyncio.create_task(compiler.grammar(Structure("regex", pattern)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert "yes" in (await compiler.grammar(Structure("choice", '["yes", "no"]'))).grammar


async def test_what_nobody_waits_for_any_more_is_not_begun_on(compiler: Compiler) -> None:
    first, second = (
        [asyncio.create_task(compiler.grammar(Structure("regex", f"{start}{number}"))) for number in range(50)]
        for start in "xy"
    )
    await asyncio.sleep(0)  # one turn of the loop: all of them are asked for, and no process is there yet
    assert len(compiler._asked) == 100
    for leaving in first:
        leaving.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    assert len(compiler._asked) == 50
    again = asyncio.create_task(compiler.grammar(Structure("regex", "x0")))  # one of those that were given up
    assert all(await asyncio.gather(*second, again))
    assert len(compiler._known) == 51


async def test_more_than_may_wait_are_refused_at_once(folder: Path) -> None:
    async with compiling(folder, waiting=4) as compiler:
        ask = compiler.grammar
        asked = [asyncio.create_task(ask(Structure("regex", f"x{n}"), caller="a")) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Exhausted) as error:
            await ask(Structure("regex", "x2"), caller="a")
        assert (error.value.reason, bool(error.value.retry_after)) == ("TOO_MANY_STRUCTURES", True)
        asked += [asyncio.create_task(ask(Structure("regex", f"y{n}"), caller="b")) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Exhausted):
            await ask(Structure("regex", "z"), caller="c")
        assert all(await asyncio.gather(*asked, ask(Structure("regex", "x0"), caller="c")))


async def test_one_that_many_ask_for_at_once_is_tried_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    send = Child.send
    monkeypatch.setattr(Child, "send", lambda child, message: (told.append(message), send(child, message)))
    refusals = await asyncio.gather(*(refusal(compiler, EXPLODING) for _ in range(5)))
    assert len({error.message for error in refusals}) == 1
    assert len([message for message in told if isinstance(message, Compile)]) == 1


async def test_what_one_caller_asks_for_does_not_hold_up_another(compiler: Compiler) -> None:
    """Forty that take all of their time would take ten seconds on both processes; each of the other's comes at once."""
    await compiler.grammar(GOOD)
    slow = [Structure("json_schema", f'{{"type": "integer", "multipleOf": {99_999_989 - n}}}') for n in range(0, 80, 2)]
    greedy = [asyncio.create_task(refusal_for(compiler, each, "greedy")) for each in slow]
    await asyncio.sleep(0)
    for number in range(5):
        assert await compiler.grammar(Structure("regex", f"quick{number}"), caller="modest")
    assert sum(task.done() for task in greedy) < 5
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def refusal_for(compiler: Compiler, structure: Structure, caller: str) -> None:
    with pytest.raises(InvalidInput):
        await compiler.grammar(structure, caller=caller)


def pids(compiler: Compiler) -> set[int]:
    return {child.process.pid for child in compiler._children}


def mapped(pid: int) -> int:
    """Bytes of a process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def signal_all(compiler: Compiler, number: int) -> None:
    for pid in pids(compiler):
        os.kill(pid, number)


async def test_processes_that_stand_still_are_no_structures_fault(folder: Path) -> None:
    async with compiling(folder, still_seconds=0.1) as compiler:
        await asyncio.gather(compiler.grammar(GOOD), compiler.grammar(Structure("regex", "b+")))
        await asyncio.gather(*compiler._tasks)
        signal_all(compiler, signal.SIGSTOP)
        stopped = pids(compiler)
        asked = Structure("regex", "c+")
        with pytest.raises(Unavailable) as error:
            await compiler.grammar(asked)
        assert (error.value.reason, bool(error.value.retry_after)) == ("STRUCTURE_UNAVAILABLE", True)
        assert await compiler.grammar(asked), "it is not remembered, and other processes are started"
        await asyncio.gather(*compiler._tasks)
        assert not stopped & pids(compiler)


async def test_where_one_process_stands_still_the_other_is_asked(folder: Path) -> None:
    async with compiling(folder, still_seconds=0.1) as compiler:
        await compiler.grammar(GOOD)
        await asyncio.gather(*compiler._tasks)
        stopped, *_ = pids(compiler)
        os.kill(stopped, signal.SIGSTOP)
        for letter in "bcd":
            assert await compiler.grammar(Structure("regex", f"{letter}+"))
        await asyncio.gather(*compiler._tasks)
        assert stopped not in pids(compiler)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_fork_that_is_ended_or_stopped_is_no_structures_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Each of two tries meets the same."""
    hit: list[int] = []
    passed_to = CpuTimeLimit.passed_to

    def struck(limit: CpuTimeLimit, pid: int) -> None:
        hit.append(pid)
        os.kill(pid, number)
        passed_to(limit, pid)

    async with compiling(folder, seconds=60.0, still_seconds=0.1) as compiler:
        await compiler.grammar(GOOD)
        with monkeypatch.context() as patched:
            patched.setattr(CpuTimeLimit, "passed_to", struck)
            with pytest.raises(Unavailable) as error:
                await compiler.grammar(EXPLODING)
        assert (error.value.reason, len(hit)) == ("STRUCTURE_UNAVAILABLE", 2)
        assert await compiler.grammar(Structure("regex", "d+"))
    until(lambda: not any(map(command_line, hit)), "no fork is left")


@pytest.mark.parametrize("known", [True, False])
async def test_processes_that_were_killed_without_a_job_cost_nobody_anything(compiler: Compiler, known: bool) -> None:
    await compiler.grammar(GOOD)
    await asyncio.gather(*compiler._tasks)
    children = set(compiler._children)
    signal_all(compiler, signal.SIGKILL)
    if known:
        await eventually(lambda: all(child.has_ended for child in children), "it is known")
    assert await compiler.grammar(Structure("regex", "b+"))
    await asyncio.gather(*compiler._tasks)
    assert not children & compiler._children


async def test_where_no_process_can_be_had_callers_are_told_and_the_next_ones_are_served(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_memory(*_: Any, **__: Any) -> Child[Any]:
        raise OSError("Cannot allocate memory")

    good = GOOD
    with monkeypatch.context() as patched:
        patched.setattr(Child, "start", no_memory)
        with pytest.raises(Unavailable) as error:
            await compiler.grammar(good)
        assert error.value.reason == "STRUCTURE_UNAVAILABLE"
        await asyncio.gather(*compiler._tasks, return_exceptions=True)
    for _ in range(2):  # one for each process that could not be had
        with pytest.raises(Unavailable):
            await compiler.grammar(good)
    assert await compiler.grammar(good)
