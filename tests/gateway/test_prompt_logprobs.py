"""Logprobs of a prompt are whole when an answer begins, though events tell them in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from gateway.prompt_logprobs import CollectedLogprobs, collected
from twinlens import v1


def started(prompt_tokens: int) -> v1.GenerateResponse:
    return v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=prompt_tokens))


def of_prompt(first: int, *tokens: int) -> v1.GenerateResponse:
    logprobs = [v1.TokenLogprobs(logprob=-token) for token in tokens]
    return v1.GenerateResponse(
        delta=v1.GenerateDelta(prompt=v1.PromptLogprobs(first=first, token_ids=tokens, logprobs=logprobs))
    )


WORD = v1.GenerateResponse(delta=v1.GenerateDelta(text="a", token_ids=[7]))
END = v1.GenerateResponse(finished=v1.GenerateFinished())


def heard(events: Sequence[v1.GenerateResponse]) -> list[tuple[v1.GenerateResponse, int, int]]:
    """What comes, how many logprobs there are by then, and how many events were read for it."""
    logprobs, read = CollectedLogprobs(), 0

    async def told() -> AsyncGenerator[v1.GenerateResponse]:
        nonlocal read
        for each in events:
            read += 1
            yield each

    async def listen() -> list[tuple[v1.GenerateResponse, int, int]]:
        return [(said, len(logprobs), read) async for said in collected(told(), logprobs)]

    return asyncio.run(listen())


@pytest.mark.parametrize(
    ("events", "logprobs", "read"),
    [
        pytest.param([started(4), of_prompt(1, 5, 6), of_prompt(3, 7)], 3, 3, id="as soon as the last is there"),
        pytest.param(
            [started(4), of_prompt(1, 5), of_prompt(1, 5, 6, 7)], 3, 3, id="some told again by another service"
        ),
        pytest.param([started(1)], 0, 2, id="a prompt of one token has none"),
        pytest.param([started(4)], 0, 2, id="an answer that goes on behind its beginning has none"),
    ],
)
def test_an_answer_begins_with_all_logprobs_of_its_prompt(
    events: list[v1.GenerateResponse], logprobs: int, read: int
) -> None:
    begun, *rest = heard([*events, WORD, END])
    assert begun == (events[0], logprobs, read)
    assert [said for said, _, _ in rest] == [WORD, END]
