"""A device whose memory is too small for some steps: answers are those of one that has enough."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from llm_service.models.decoder import Decoder
from llm_service.plan import StepMemoryError, StepPlan
from llm_service.request import SamplingParams
from llm_service.settings import CacheDtype
from llm_service.worker import executor
from llm_service.worker.executor import LoneExecutor
from testkit.local_engine import LocalEngine, make_prompt
from tests.parity.cases import PARTS

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("qwen3_vl", {"prefix_cache": True, "host_blocks": 64, "blocks": 40, "overlap": True}),
        pytest.param(
            "qwen3_vl",
            {"attention": "triton", "kv_cache_dtype": CacheDtype.FP8, "step_tokens": 64},
            marks=pytest.mark.soak,
        ),
        ("qwen3_5", {"prefix_cache": True, "step_tokens": 128, "overlap": True}),
        pytest.param("qwen3_vl", {"speculative_tokens": 3, "draft_model": "itself"}, marks=pytest.mark.soak),
    ],
    ids=["blocks on the host", "triton", "states", "a draft model"],
)
def test_answers_are_the_same_though_steps_break_off_in_the_middle_of_the_model(
    family: str, given: dict[str, Any], checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(family)
    given = {key: folder if value == "itself" else value for key, value in given.items()}
    count = 2 if given.get("attention") == "triton" else len(PARTS)
    prompts = [make_prompt(folder, parts) for parts in PARTS[:count]]
    expected = [each.tokens for each in LocalEngine(folder, **given).run(prompts, GREEDY)]
    engine = LocalEngine(folder, **given)
    layer = cast(Decoder, engine.decoder).layers[1]
    steps, right = list[int](), layer.forward

    def forward(x: Tensor, *others: Any, **more: Any) -> Any:
        steps.append(len(x))
        if len(steps) in (1, 2, 4):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right(x, *others, **more)

    layer.forward = forward  # type: ignore[method-assign]
    assert [each.tokens for each in engine.run(prompts, GREEDY)] == expected
    engine.scheduler.check_integrity()
    assert engine.scheduler.step_cap.limits.max_step_tokens < engine.scheduler.limits.max_step_tokens
    layer.forward = right  # type: ignore[method-assign]
    assert [each.tokens for each in engine.run(prompts, GREEDY)] == expected


def test_what_a_step_held_is_free_before_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []
    left: list[bool] = []

    def launch(*_: Any) -> None:
        hidden = torch.zeros(8)
        held.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nException raised from malloc")

    monkeypatch.setattr(executor, "release_memory", lambda: left.append(held[0]() is None))
    with pytest.raises(StepMemoryError, match=r"out of memory\. Tried to allocate 9 GiB\.$"):
        LoneExecutor(mock.Mock(launch=launch)).launch(mock.Mock(spec=StepPlan))
    assert left == [True]
