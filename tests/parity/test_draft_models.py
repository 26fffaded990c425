"""Drafts that a model proposes change no token, whatever that model is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_service.engine.messages import Counters
from llm_service.request import SamplingParams
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.parity.cases import PARTS, SAMPLINGS

TIGHT: dict[str, Any] = {"step_tokens": 24, "blocks": 9, "prefix_cache": True}


@pytest.fixture(scope="module")
def directory(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[Prompt]:
    return [make_prompt(directory, parts) for parts in PARTS]


@pytest.fixture(scope="module")
def text_model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder as a model of text alone, with more words than the other one knows."""
    folder, config = tmp_path_factory.mktemp("text"), json.loads((directory / "config.json").read_text())
    text = {**config["text_config"], "model_type": "qwen3", "tie_word_embeddings": False, "vocab_size": 700}
    text["rope_scaling"] = None
    (folder / "config.json").write_text(json.dumps(text))
    weights = {
        name.replace("model.language_model.", "model."): weight
        for name, weight in load_file(directory / "model.safetensors").items()
        if "language_model" in name or name == "lm_head.weight"
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.ones(700 - len(weights[name]), 64)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["greedy", pytest.param("penalised", marks=pytest.mark.soak)])
def test_the_same_checkpoint_proposes_what_greedy_answers_say(
    directory: Path, prompts: list[Prompt], kind: str
) -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLINGS[kind])
    said = [outcome.tokens for outcome in LocalEngine(directory).run(prompts, sampling)]
    for given in ({}, {"max_running": 1}, TIGHT):
        engine = LocalEngine(directory, speculative_tokens=4, draft_model=directory, **given)
        for _ in range(2):
            assert [outcome.tokens for outcome in engine.run(prompts, sampling)] == said, given
        counters: Counters = engine.scheduler.counters
        assert (counters.preemptions > 0) == ("blocks" in given)
        assert counters.draft_tokens > 0
        if kind == "greedy":
            assert counters.accepted_draft_tokens == counters.draft_tokens
        if kind == "greedy" and "max_running" in given:
            assert counters.steps == 2 * len(prompts) * (1 + -(-39 // 5))


def test_what_a_draft_model_keeps_comes_back_from_the_host_as_well(directory: Path, prompts: list[Prompt]) -> None:
    """The same checkpoint proposes nothing but what is right, unless it lacks what went before."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    said = [outcome.tokens for outcome in LocalEngine(directory).run(prompts, sampling)]
    longest = max(len(prompt.layout.ids) for prompt in prompts)
    given = {**TIGHT, "blocks": (longest + 24) // 16 + 2, "host_blocks": 100}
    engine = LocalEngine(directory, speculative_tokens=4, draft_model=directory, **given)
    for _ in range(2):
        assert [engine.run([prompt], sampling)[0].tokens for prompt in prompts] == said
    counters = engine.scheduler.counters
    assert engine.scheduler.state().kv_blocks_loaded > 0
    assert counters.accepted_draft_tokens == counters.draft_tokens > 0


def test_another_model_proposes_in_vain(
    directory: Path, prompts: list[Prompt], checkpoints: Callable[..., Path], text_model: Path
) -> None:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    said = [outcome.tokens for outcome in LocalEngine(directory).run(prompts, sampling)]
    for draft in (checkpoints("qwen2_vl"), text_model):
        for given in ({}, TIGHT):
            engine = LocalEngine(directory, speculative_tokens=4, draft_model=draft, **given)
            assert [outcome.tokens for outcome in engine.run(prompts, sampling)] == said, given
            counters = engine.scheduler.counters
            assert counters.draft_tokens > counters.accepted_draft_tokens


def test_states_go_back_behind_wrong_drafts_of_a_model(checkpoints: Callable[..., Path]) -> None:
    directory = checkpoints("qwen3_5")
    prompts = [make_prompt(directory, parts) for parts in PARTS]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    said = [outcome.tokens for outcome in LocalEngine(directory).run(prompts, sampling)]
    engine = LocalEngine(directory, speculative_tokens=4, draft_model=checkpoints("qwen2_vl"))
    assert [outcome.tokens for outcome in engine.run(prompts, sampling)] == said
    assert engine.scheduler.counters.draft_tokens > 0


def test_a_model_of_text_alone_proposes_what_is_said_to_text(
    directory: Path, prompts: list[Prompt], text_model: Path
) -> None:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    engine = LocalEngine(directory, speculative_tokens=4, draft_model=text_model)
    engine.run(prompts[:1], sampling)
    assert engine.scheduler.counters.accepted_draft_tokens == engine.scheduler.counters.draft_tokens > 0
