"""Structures are compiled in processes that are killed when time is over, and each answer is remembered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import Exhausted, InvalidInput, Unavailable
from common.processes import Child
from llm_service.grammar.compiler import Compiler
from llm_service.grammar.messages import Vocabulary
from llm_service.request import Structure
from tests.checkpoints import VOCABULARY
from tests.waiting import until

EXPLODING = Structure("json_schema", json.dumps({"type": "integer", "multipleOf": 99_999_989}))


@pytest.fixture
async def compiler(checkpoints: Callable[..., Path]) -> AsyncIterator[Compiler]:
    made = Compiler(Vocabulary(str(checkpoints("qwen3_vl")), VOCABULARY, [0]), seconds=2.0)
    yield made
    await made.stop()


async def refusal(compiler: Compiler, structure: Structure) -> InvalidInput:
    with pytest.raises(InvalidInput) as error:
        await compiler.grammar(structure)
    return error.value


async def test_a_structure_becomes_a_grammar(compiler: Compiler) -> None:
    assert json.loads(await compiler.grammar(Structure("regex", "a+")))


async def test_one_that_makes_no_sense_is_refused_by_its_field(compiler: Compiler) -> None:
    error = await refusal(compiler, Structure("regex", "(("))
    assert (error.reason, error.field) == ("BAD_STRUCTURE", "sampling.regex")


async def test_one_that_takes_too_long_costs_a_process_and_the_next_is_served(compiler: Compiler) -> None:
    good = Structure("regex", "a+")
    refused, grammar = await asyncio.gather(refusal(compiler, EXPLODING), compiler.grammar(good))
    assert "too long" in refused.message
    assert grammar
    assert await compiler.grammar(Structure("regex", "b+"))


async def test_a_refusal_is_remembered(compiler: Compiler) -> None:
    first = await refusal(compiler, EXPLODING)
    coming = asyncio.create_task(refusal(compiler, EXPLODING))
    await asyncio.sleep(0)  # one turn of the loop: no process was asked
    assert coming.done()
    assert coming.result().message == first.message


async def test_a_refusal_for_time_alone_does_not_last(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the machine stood still, and not the structure was to blame."""
    monkeypatch.setattr("llm_service.grammar.compiler._DOUBT_SECONDS", 0.01)
    compiler._seconds = 0.0
    structure = Structure("regex", "a+")
    assert "too long" in (await refusal(compiler, structure)).message
    await asyncio.to_thread(until, lambda: structure not in compiler._known, "it is forgotten")
    compiler._seconds = 30.0
    assert await compiler.grammar(structure)


async def test_no_more_answers_are_remembered_than_the_bound(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_service.grammar.compiler._REMEMBERED", 3)
    asked = [Structure("regex", f"{letter}+") for letter in "abcdef"]
    for structure in asked:
        await compiler.grammar(structure)
    assert list(compiler._known) == asked[-3:]
    assert await compiler.grammar(asked[0]), "one that was forgotten is compiled again"


async def test_a_caller_who_leaves_leaves_no_answer_for_the_next(compiler: Compiler) -> None:
    for pattern in ("x+", "y+", "z+"):
        leaving = asyncio.create_task(compiler.grammar(Structure("regex", pattern)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert "yes" in await compiler.grammar(Structure("choice", '["yes", "no"]'))


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


async def test_more_than_may_wait_are_refused_at_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_service.grammar.compiler._WAITING", 2)
    asked = [asyncio.create_task(compiler.grammar(Structure("regex", f"x{number}"))) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Exhausted) as error:
        await compiler.grammar(Structure("regex", "x2"))
    assert (error.value.reason, bool(error.value.retry_after)) == ("TOO_MANY_STRUCTURES", True)
    assert all(await asyncio.gather(*asked, compiler.grammar(Structure("regex", "x0"))))


async def test_one_that_many_ask_for_at_once_is_tried_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = Child.start, 0

    async def counted(*given: Any, **named: Any) -> Child[Any]:
        nonlocal started
        started += 1
        return await start(*given, **named)

    monkeypatch.setattr(Child, "start", counted)
    refusals = await asyncio.gather(*(refusal(compiler, EXPLODING) for _ in range(5)))
    assert len({error.message for error in refusals}) == 1
    await asyncio.gather(*compiler._tasks)
    assert started == 3, "two to begin with, and one for the one that was killed"


async def test_where_no_process_can_be_had_callers_are_told_and_the_next_ones_are_served(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_memory(*_: Any, **__: Any) -> Child[Any]:
        raise OSError("Cannot allocate memory")

    good = Structure("regex", "a+")
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
