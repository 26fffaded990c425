"""Steps after one for which there was too little memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.step_cap import StepCap
from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.sight import SpanRule

LIMITS = SchedulerLimits(max_running=8, max_step_tokens=64, max_context=512)


def test_steps_become_smaller_with_each_that_fails_and_larger_once_many_succeed() -> None:
    cap = StepCap(LIMITS, patience=2)
    assert not cap.succeeded()
    assert cap.failed(50, 8)
    assert (cap.limits.max_step_tokens, cap.limits.max_running) == (25, 8)
    assert cap.failed(25, 8)
    assert cap.failed(12, 8)
    assert (cap.limits.max_step_tokens, cap.limits.max_running) == (6, 6), "each that runs may decode"
    assert [cap.succeeded() for _ in range(16)] == [*[False] * 15, True], "the more failed, the later"
    assert (cap.limits.max_step_tokens, cap.limits.max_running) == (12, 8)
    assert sum(cap.succeeded() for _ in range(200)) == 3
    assert cap.limits is LIMITS
    assert not cap.failed(1, 1)
    assert cap.limits is LIMITS


@pytest.mark.parametrize("spans", [SpanRule.EVERYWHERE, SpanRule.WHOLE_PROMPTS])
def test_what_is_computed_at_once_finds_room_beside_fewer_sequences(spans: SpanRule) -> None:
    cap = StepCap(replace(LIMITS, chunk_rule=ChunkRule(spans)), patience=2)
    assert cap.failed(64, 6)
    assert (cap.limits.max_step_tokens, cap.limits.max_running) == (64, 3)
    assert cap.failed(64, 3)
    assert (cap.limits.max_step_tokens, cap.limits.max_running) == (64, 1)
    assert not cap.failed(64, 1)
