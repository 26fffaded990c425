"""Structures are compiled in processes that are killed when time is over, and each answer is remembered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from common.errors import InvalidInput
from llm_service.grammar.compiler import Compiler
from llm_service.grammar.messages import Vocabulary
from llm_service.request import Structure
from tests.checkpoints import VOCABULARY

EXPLODING = Structure("json_schema", json.dumps({"type": "integer", "multipleOf": 99_999_989}))


@pytest.fixture
async def compiler(checkpoints: Callable[..., Path]) -> AsyncIterator[Compiler]:
    made = Compiler(Vocabulary(str(checkpoints("qwen3_vl")), VOCABULARY, [0]), seconds=0.5)
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


async def test_a_caller_who_leaves_leaves_no_answer_for_the_next(compiler: Compiler) -> None:
    for pattern in ("x+", "y+", "z+"):
        leaving = asyncio.create_task(compiler.grammar(Structure("regex", pattern)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert "yes" in await compiler.grammar(Structure("choice", '["yes", "no"]'))
