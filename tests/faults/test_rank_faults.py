"""A tensor-parallel rank, or the engine itself, dies or freezes: the group comes back, and its requests go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import Service, command_line, llm_server
from tests.rpc.pairs import LLM_FLAGS, asked, greedy, tokens
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user

PROMPT = asked(user("Tell me about two red circles."))
LONG = asked(user("count"), greedy(100))


@pytest.fixture(scope="module")
def group(checkpoints: Callable[..., Path]) -> Iterator[Service]:
    flags = {**LLM_FLAGS, "tp": 2, "rank_timeout_seconds": 5, "kernels": "torch"}
    with llm_server(checkpoints("qwen3_vl"), light=False, **flags) as service:
        yield service


@pytest.fixture(scope="module")
def undisturbed(group: Service) -> list[int]:
    """The answer to `LONG`."""
    with LlmClient(group.address) as client:
        return tokens(client, LONG)


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        pytest.param(signal.SIGKILL, "llm_service.worker", id="killed worker"),
        pytest.param(signal.SIGKILL, "llm_service.engine", id="killed engine", marks=pytest.mark.soak),
        pytest.param(signal.SIGSTOP, "llm_service.worker", id="frozen worker", marks=pytest.mark.soak),
        pytest.param(signal.SIGSTOP, "llm_service.engine", id="frozen engine", marks=pytest.mark.soak),
    ],
)
def test_answers_go_on_when_the_group_is_back(
    group: Service, undisturbed: list[int], module: str, fault: signal.Signals
) -> None:
    with LlmClient(group.address) as client:
        until(lambda: _serves(client), "the group serves")
        expected = tokens(client, PROMPT)
        members = {*group.children("llm_service.engine"), *group.children("llm_service.worker")}
        stream = iter(client.generate(LONG))
        assert next(stream).HasField("started")
        os.kill(group.children(module)[0], fault)
        assert [token for event in stream for token in event.delta.token_ids] == undisturbed
        until(lambda: _serves(client), "the group is back")
        assert tokens(client, PROMPT) == expected
        until(lambda: not any(map(command_line, members)), "no process of the old group is left")


def test_a_rank_that_dies_while_there_is_nothing_to_do_is_noticed(group: Service) -> None:
    with LlmClient(group.address) as client:
        until(lambda: _serves(client), "the group serves")
        lost = group.children("llm_service.worker")[0]
        os.kill(lost, signal.SIGKILL)
        until(lambda: group.children("llm_service.worker") not in ([], [lost]), "another rank has taken its place")
        until(lambda: _serves(client), "the group is back")
        assert len(tokens(client, PROMPT)) == 8


def _serves(client: LlmClient) -> bool:
    try:
        client.get_load()
    except TwinlensError:
        return False
    return True
