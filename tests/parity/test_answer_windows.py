"""Answers whose tokens see all of the prompt and a window of themselves, as Unlimited-OCR's: transformers' tokens,
whatever happens to them, and of no use to prompts that go on behind them."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoints.checkpoint import CheckpointError
from llm_service.engine.block_identity import BlockIdentities
from llm_service.families.family import FULL
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention.backend import AttentionKind, CacheShape
from llm_service.layers.attention.choose import choose
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.loader import HEAD
from llm_service.models.trial import try_ours_of
from llm_service.request import PromptLayout, TokenPrompt
from llm_service.settings import CacheDtype
from testkit.hf_side import GREEDY, Served
from testkit.local_engine import LocalEngine, Prompt, misled_drafts
from testkit.reference import CACHE
from tests.parity.cases import RoundingCache
from tests.parity.graphed import graphed
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import config_of_recipe, make

WINDOW = 24
"""Of the recipe: shorter than an answer."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts, and the tokens that transformers answers with."""

    served: Served
    library: Reference
    prompts: list[Prompt]
    expected: list[list[int]]

    def said_by(self, engine: LocalEngine) -> list[list[int]]:
        return [outcome.tokens for outcome in engine.run(self.prompts, GREEDY)]


BY = {
    "ours by torch": {"attention": "torch"},
    "ours by numba": {"attention": "numba"},
    "transformers'": {"by_hf": True},
    "transformers' by numba": {"by_hf": True, "attention": "numba"},
}
"""Whose decoder computes, with which back end of attention."""
by_each = pytest.mark.parametrize("by", BY.values(), ids=BY)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make("unlimited_ocr", tmp_path_factory.mktemp("unlimited"))
    served, library = Served.of(folder), Reference(folder)
    asked = [PROMPTS["text"], ["Who was the first to draw a map of the moon?"], PROMPTS["one picture"]]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    return Case(served, library, [served.prompt(parts) for parts in asked], expected)


@by_each
def test_after_a_preemption_what_was_said_is_computed_again_as_an_answer(case: Case, by: dict[str, Any]) -> None:
    blocks = sum(-(-(len(prompt.layout.ids) + TOKENS) // 16) for prompt in case.prompts)
    tight = case.served.engine(blocks=blocks - 2, max_running=3, prefix_cache=True, **by)
    assert isinstance(tight.decoder, Decoder) != ("by_hf" in by)
    assert case.said_by(tight) == case.expected
    assert tight.scheduler.counters.preemptions > 0, "the cache was not tight enough to prove anything"


@by_each
def test_drafts_are_verified_within_the_window(case: Case, by: dict[str, Any]) -> None:
    engine = case.served.engine(speculative_tokens=4, draft=misled_drafts(case.expected), **by)
    assert case.said_by(engine) == case.expected
    assert engine.scheduler.counters.accepted_draft_tokens > 0


@pytest.fixture(scope="module")
def text_alone(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text as a checkpoint of its own."""
    folder, side = tmp_path_factory.mktemp("text"), case.served.text()
    assert side is not None
    config = json.loads((case.served.folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    named = {side.own_name(name): each for name, each in load_file(case.served.folder / "model.safetensors").items()}
    tensors = {name if name == HEAD else f"model.{name}": each for name, each in named.items() if name is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


TIGHT: dict[str, Any] = {"step_tokens": 24, "blocks": 10, "prefix_cache": True}


@pytest.mark.parametrize("given", [{}, {"attention": "torch"}, TIGHT], ids=["numba", "torch", "tight"])
def test_such_a_text_proposes_what_it_says_itself(case: Case, text_alone: Path, given: dict[str, Any]) -> None:
    """Prompts without media, whose rows a model of text alone does not have; preempted answers among them."""
    prompts, expected = case.prompts[:2], case.expected[:2]
    assert min(map(len, expected)) > WINDOW
    engine = case.served.engine(speculative_tokens=4, draft_model=text_alone, **given)
    for _ in range(2):
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
    counters = engine.scheduler.counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 0
    assert (counters.preemptions > 0) == (given is TIGHT)


def test_a_prompt_that_goes_on_behind_an_answer_has_no_blocks_of_it(case: Case) -> None:
    engine, first = case.served.engine(prefix_cache=True), case.prompts[0]
    said = engine.run([first], GREEDY)[0].tokens
    ids = [*first.layout.ids, *said, *first.layout.ids[:5]]
    layout: PromptLayout = case.served.builder.layout(case.served.builder.pieces(TokenPrompt(ids), []), [])
    found = engine.run([Prompt(layout, [], {})], GREEDY)[0]
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    assert found.tokens == case.library.tokens(given)
    assert found.cached == len(first.layout.ids) // 16 * 16
    assert engine.run([Prompt(layout, [], {})], GREEDY)[0].cached == (len(ids) - 1) // 16 * 16


@pytest.mark.parametrize("drafts", [0, 4])
def test_steps_have_graphs(case: Case, drafts: int) -> None:
    given: dict[str, Any] = {"hf": case.served.found, "text": case.served.text(), "drafts": drafts}
    engine, _ = graphed(case.served.folder, **given, draft=misled_drafts(case.expected) if drafts else None)
    assert case.said_by(engine) == case.expected
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.replays == engine.scheduler.counters.steps, "every step has a graph that fits it"
    assert (engine.scheduler.counters.accepted_draft_tokens > 0) == (drafts > 0)


@pytest.mark.soak
def test_kernels_for_gpus_know_it(case: Case) -> None:
    """In their interpreter."""
    engine = case.served.engine(attention="triton", step_tokens=40)
    assert [outcome.tokens for outcome in engine.run(case.prompts[:2], GREEDY)] == case.expected[:2]


@pytest.mark.parametrize("attention", ["torch", pytest.param("triton", marks=pytest.mark.soak)])
def test_keys_and_values_in_8_bits_are_those_of_a_cache_that_rounds(case: Case, attention: str) -> None:
    model, prompt = case.library.model, case.prompts[1]
    ids = torch.tensor([prompt.layout.ids])
    cache = RoundingCache(config=model.config.get_text_config(decoder=True))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: cache}
    expected = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    engine = case.served.engine(attention=attention, kv_cache_dtype=CacheDtype.INT8, step_tokens=16)
    assert engine.run([prompt], GREEDY)[0].tokens == expected


def test_layers_may_see_all_of_an_answer_as_well() -> None:
    config = config_of_recipe("unlimited_ocr")
    config.text_config.layer_types[0] = FULL
    kinds = [TextConfig.of(config.text_config.to_dict()).layer_kind(layer) for layer in range(2)]
    assert [kind.sight for kind in kinds] == [Sight(), Sight(answer_window=WINDOW)]
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


@pytest.mark.parametrize("seen", ["all of an answer", "a window of the prompt"])
def test_an_answer_that_sees_something_else_is_told(seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trial, in which an answer is longer than a window."""
    right = TextConfig.layer_kind
    less = Sight() if seen == "all of an answer" else Sight(window=WINDOW)
    monkeypatch.setattr(TextConfig, "layer_kind", lambda config, layer: replace(right(config, layer), sight=less))
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers': they differ by"):
        try_ours_of(config_of_recipe("unlimited_ocr"), drawn_prompt)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"topk_method": "group_limited_greedy", "n_group": 2}, "experts that are chosen as group_limited_greedy says"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"mlp_bias": True}, "proj.bias"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported"),
    ],
)
def test_what_its_text_may_ask_for_and_ours_lacks_is_refused(asked: dict[str, Any], why: str) -> None:
    config = config_of_recipe("unlimited_ocr")
    for name, value in asked.items():
        setattr(config.text_config, name, value)
    with pytest.raises(CheckpointError, match=why):
        try_ours_of(config, drawn_prompt)


def test_back_ends_that_do_not_know_such_a_window_say_so() -> None:
    kind, gpu = AttentionKind(Sight(answer_window=8)), torch.device("cuda")
    shape = CacheShape(1, 1, 16, 4, 2, 64, kind)
    with pytest.raises(CheckpointError, match="flash cannot be used: it knows no windows that are for answers alone"):
        choose("flash", shape, torch.bfloat16, gpu)
    with pytest.raises(CheckpointError, match="it knows no windows that are for answers alone over latents"):
        choose("triton", replace(shape, kv_heads=1, values_in_keys=32), torch.float32, torch.device("cpu"))


def test_blocks_differ_from_where_an_answer_begins() -> None:
    tokens = array("i", range(16))
    plain, early, late = (BlockIdentities(b"root", [], *other).first(4, tokens, 4) for other in ((), (4,), (10,)))
    assert [one == other for one, other in zip(plain, early, strict=True)] == [True, False, False, False]
    assert [one == other for one, other in zip(plain, late, strict=True)] == [True, True, False, False]
    assert not {*early[1:]} & {*late[2:]}
