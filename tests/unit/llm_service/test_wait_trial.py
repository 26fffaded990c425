"""Waits for a GPU while a step is launched: told by torch's own warnings, with a stand-in for what makes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("triton")

from benchmarks.step_host import NoGraph, runner_of
from common.gpu.device import told_waits
from llm_service.plan import Draw, StepPlan
from llm_service.worker.dummy_plans import prompt_plan
from llm_service.worker.model_runner import Launched, ModelRunner
from llm_service.worker.wait_trial import unmeant_waits

SAID = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:146.)"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that torch was told, in order."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", told.append)
    return told


def wait(modes: list[str]) -> None:
    """As a copy from the device does."""
    if modes and modes[-1] == "warn":
        warnings.warn(SAID, UserWarning, stacklevel=1)


def test_each_wait_is_told_and_nothing_else(modes: list[str]) -> None:
    wait(modes)
    with told_waits() as told:
        for _ in range(2):
            wait(modes)
        warnings.warn("a prototype feature", UserWarning, stacklevel=1)
    wait(modes)
    assert [line.rpartition(":")[0] for line in told] == [__file__] * 2
    assert modes == ["warn", "default"]


def test_no_later_operator_is_watched_after_an_error(modes: list[str]) -> None:
    with pytest.raises(ValueError, match="no step"), told_waits():
        raise ValueError("no step")
    assert modes == ["warn", "default"]


def launching(monkeypatch: pytest.MonkeyPatch, waits: Callable[[StepPlan], int], modes: list[str]) -> ModelRunner:
    """A runner that waits so often for what it launches, and once for the result."""
    runner = runner_of(2, 64, NoGraph())
    plain, result = runner.launch, Launched.result

    def launch(plan: StepPlan, *given: Any, **named: Any) -> Launched:
        for _ in range(waits(plan)):
            wait(modes)
        return plain(plan, *given, **named)

    def waited(launched: Launched) -> Any:
        wait(modes)
        return result(launched)

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(Launched, "result", waited)
    return runner


def test_a_start_tells_of_waits_that_are_not_meant(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw is tried as well as the likeliest token, each once it has been computed before."""
    runner = launching(monkeypatch, lambda plan: int(plan.draws[0].temperature > 0), modes)
    with capture_logs() as said:
        assert len(unmeant_waits(runner)) == 1
    assert [line["at"].rpartition(":")[0] for line in said] == [__file__]
    assert modes == ["warn", "default"] * 2


def test_tokens_that_drafts_are_to_follow_are_waited_for(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody:
        def propose(self, *_: Any) -> Callable[[], list[list[int]]]:
            return list

    runner = launching(monkeypatch, lambda _: 1, modes)
    runner.proposer = Nobody()  # type: ignore[assignment]
    assert unmeant_waits(runner) == []


def test_the_steps_that_follow_are_what_they_would_have_been(modes: list[str]) -> None:
    plan = prompt_plan(9, 16)[0]
    plan = msgspec.structs.replace(plan, draws=[Draw(at=8, logprobs=3)])
    runner = runner_of(2, 64, NoGraph())
    before = runner.run(plan)
    unmeant_waits(runner)
    after = runner.run(plan)
    assert modes
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
