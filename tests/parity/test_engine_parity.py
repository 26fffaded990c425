"""The engine's own freedoms change nothing that is said: overlap, company, cuts of prefill, cached blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_service.engine.block_manager import BlockTable
from llm_service.engine.sequence import Sequence
from llm_service.request import SamplingParams
from testkit import reference
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.parity.cases import PARTS, SAMPLINGS


@pytest.fixture(scope="module")
def directory(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[Prompt]:
    return [make_prompt(directory, parts) for parts in PARTS]


@pytest.mark.parametrize("kind", [pytest.param("greedy", marks=pytest.mark.soak), "seeded", "penalised"])
def test_overlap_company_chunks_and_preemption_change_no_token(
    directory: Path, prompts: list[Prompt], kind: str
) -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLINGS[kind])
    alone = [LocalEngine(directory).run([prompt], sampling)[0].tokens for prompt in prompts]
    assert len({tuple(said) for said in alone}) == len(alone), "the prompts prove nothing"
    longest = max(len(prompt.layout.ids) for prompt in prompts)
    settings: list[dict[str, Any]] = [
        {"overlap": True},
        {"overlap": True, "step_tokens": 16, "max_running": 8},
        {"overlap": True, "step_tokens": 64, "keep_media_whole": True, "prefix_cache": True},
        {"overlap": True, "blocks": (longest + 40) // 16 + 4, "step_tokens": 64, "prefix_cache": True},
    ]
    for given in settings:
        engine = LocalEngine(directory, **given)
        for _ in range(2):
            outcomes = engine.run([*prompts, prompts[0], prompts[1]], sampling)
            assert [outcome.tokens for outcome in outcomes] == [*alone, alone[0], alone[1]], given
        if "blocks" in given:
            assert engine.scheduler.counters.preemptions > 0, "the cache was not tight enough to prove anything"


@pytest.mark.parametrize(
    "kind", ["greedy", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("seeded", "penalised"))]
)
def test_drafts_change_no_token_and_take_fewer_steps_where_an_answer_repeats_itself(
    directory: Path, prompts: list[Prompt], kind: str
) -> None:
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=2, **SAMPLINGS[kind])
    without = LocalEngine(directory)
    said = without.run(prompts, sampling)
    for given in ({"max_running": 1}, {}, {"step_tokens": 16, "blocks": 12, "prefix_cache": True}):
        engine = LocalEngine(directory, speculative_tokens=4, **given)
        outcomes = engine.run(prompts, sampling)
        assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in said], given
        for ours, theirs in zip(outcomes, said, strict=True):
            for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert one is not None
                assert other is not None
                assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
        counters = engine.scheduler.counters
        assert counters.accepted_draft_tokens <= counters.draft_tokens
        if kind == "greedy":  # a random model goes round in circles
            assert counters.accepted_draft_tokens > 0
            assert counters.steps < without.scheduler.counters.steps or given
        if "blocks" in given:
            assert counters.preemptions > 0, "the cache was not tight enough to prove anything"


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen4_exp", marks=pytest.mark.soak)])
def test_states_go_back_to_before_drafts_of_which_one_was_wrong(
    family: Family, checkpoints: Callable[..., Path]
) -> None:
    """Drafts are what will be said; of every second step's one is not."""
    directory = checkpoints(family)
    prompts = [make_prompt(directory, parts) for parts in PARTS]
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, temperature=0.0)
    without = LocalEngine(directory)
    said = [outcome.tokens for outcome in without.run(prompts, sampling)]
    ids = list(range(1, len(prompts) + 1))

    def foreseen(sequence: Sequence, count: int) -> array[int]:
        drafts = array("i", said[ids.index(sequence.id)][sequence.generated :][:count])
        wrong = sequence.generated % (2 * count)
        if wrong < len(drafts):
            drafts[wrong] ^= 1
        return drafts

    for given in ({}, {"step_tokens": 80, "blocks": 18, "prefix_cache": True}):
        engine = LocalEngine(directory, speculative_tokens=4, draft=foreseen, **given)
        assert [outcome.tokens for outcome in engine.run(prompts, sampling)] == said, given
        counters = engine.scheduler.counters
        assert 0 < counters.accepted_draft_tokens < counters.draft_tokens
        assert given or counters.steps < without.scheduler.counters.steps
        assert (counters.preemptions > 0) == ("blocks" in given)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_whose_cached_tail_was_evicted_up_to_inside_a_picture_goes_on_with_the_rows_from_there(
    directory: Path, overlap: bool
) -> None:
    prompt, sampling = make_prompt(directory, PARTS[2]), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (alone,) = LocalEngine(directory).run([prompt], sampling)
    engine = LocalEngine(directory, blocks=200, block_size=1, prefix_cache=True, overlap=overlap)
    engine.run([prompt], sampling)
    manager, span = engine.scheduler.blocks, prompt.layout.spans[1]
    assert span.end - span.begin > 4
    for kept in (span.end - 1, span.begin + 3, span.begin + 1, span.begin):
        taken = BlockTable()
        assert manager.grow(taken, manager.total - kept), "all but the head is taken by another"
        manager.free(taken)
        (again,) = engine.run([prompt], sampling)
        assert (again.cached, again.tokens) == (kept, alone.tokens)


@pytest.mark.parametrize("step_tokens", [4096, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_the_references_however_prefill_is_cut_or_cached(
    directory: Path, prompts: list[Prompt], step_tokens: int, overlap: bool
) -> None:
    engine = LocalEngine(directory, step_tokens=step_tokens, overlap=overlap, prefix_cache=True)
    asked = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=5)
    engine.run(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    for prompt, outcome in zip(prompts, engine.run(prompts, asked), strict=True):
        logits = reference.reference_logits(directory, prompt.inputs).double().log_softmax(-1)
        ids = torch.tensor(prompt.layout.ids)
        wanted = logits[:-1].gather(1, ids[1:, None])[:, 0]
        given = torch.tensor([each.chosen for each in outcome.prompt], dtype=torch.float64)
        assert outcome.cached == 0
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        top = torch.tensor([[value for _, value in each.top] for each in outcome.prompt], dtype=torch.float64)
        torch.testing.assert_close(top, logits[:-1].topk(5).values, rtol=1e-4, atol=1e-4)
