"""Prompts all of whose tokens see each other, as PaliGemma's: laid out as transformers' processor does it, computed at
once, and answered with transformers' tokens, whatever happens to them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.hf.classes import transformers
from common.hf.description import PromptFrame
from common.hf.models import describe
from common.hf.processors import frame_of, processor_of
from common.media.item import Key, Modality
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention import general_backend
from llm_service.layers.attention.backend import AttentionKind
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.model_config.served import ServedModel
from llm_service.models.hf import attention as hf_attention
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.trial import try_config, try_ours, try_ours_of, try_out
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message, TextPrompt, TokenPrompt
from testkit.attention_cases import otherwise
from testkit.hf_side import GREEDY, Served, compare
from testkit.local_engine import LocalEngine, Prompt, misled_drafts
from tools.models.compare import OURS
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS, picture
from tools.models.recipes.recipe import Recipe
from tools.models.recipes.spans import PALIGEMMA_2, RECIPES
from tools.models.reference import Reference
from tools.models.tiny import config_of, make, make_by

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors

STEP = RECIPES["paligemma"].step_tokens


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts, and the tokens that transformers answers with."""

    served: Served
    prompts: list[Prompt]
    expected: list[list[int]]

    def said_by(self, engine: LocalEngine) -> list[list[int]]:
        return [outcome.tokens for outcome in engine.run(self.prompts, GREEDY)]


def case_of(recipe: Recipe, folder: Path) -> Case:
    folder = make_by(recipe, folder)
    served, library = Served.of(folder), Reference(folder)
    asked = [*PROMPTS.values(), ["Look: ", picture(4, 90, 90), " Is it a map?"]]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    return Case(served, [served.prompt(parts) for parts in asked], expected)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Of a text with windows, shorter than prompts, and with soft caps."""
    return case_of(PALIGEMMA_2, tmp_path_factory.mktemp("paligemma2"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Of a text without either."""
    return case_of(RECIPES["paligemma"], tmp_path_factory.mktemp("paligemma"))


@pytest.fixture(params=["case", "ours"])
def either(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


def test_ids_and_tokens_are_those_of_transformers(either: Case) -> None:
    assert {"text", "one picture", OURS} <= compare(either.served, STEP)


def test_they_are_those_of_either_decoder(case: Case) -> None:
    engine = case.served.engine(step_tokens=STEP, by_hf=True)
    assert isinstance(engine.decoder, HfDecoder)
    assert case.said_by(engine) == case.expected


def test_after_a_preemption_an_answer_is_computed_again_and_sees_what_is_before_it_alone(either: Case) -> None:
    case = either
    tight = case.served.engine(blocks=13, step_tokens=STEP, max_running=4, prefix_cache=True)
    assert case.said_by(tight) == case.expected
    assert tight.scheduler.counters.preemptions > 0, "the cache was not tight enough to prove anything"


def test_drafts_are_verified_behind_such_a_prompt(either: Case) -> None:
    case = either

    engine = case.served.engine(speculative_tokens=4, draft=misled_drafts(case.expected))
    assert case.said_by(engine) == case.expected
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens


def test_questions_about_one_picture_are_answered_from_what_was_computed_for_each(either: Case) -> None:
    """What was computed of the picture for one question is not what it is for another."""
    case = either
    engine, library = case.served.engine(prefix_cache=True), Reference(case.served.folder)
    cached = []
    for question in ("What is it?", "Which is red?", "What is it?"):
        parts = [picture(1, 120, 90), question]
        (outcome,) = engine.run([case.served.prompt(parts)], GREEDY)
        assert outcome.tokens == library.tokens(library.inputs(parts))
        cached.append(outcome.cached)
    assert cached == [0, 0, 48]


@pytest.mark.parametrize(
    "wrong",
    [SpanRule.NOWHERE, SpanRule.EVERYWHERE, None],
    ids=["what is before it alone", "as far as a window reaches", "all but what was computed before"],
)
def test_a_trial_tells_other_masks(case: Case, wrong: SpanRule | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_out(case.served.folder).spans is SpanRule.WHOLE_PROMPTS
    right = general_backend._Segment.mask

    def mask(segment: general_backend._Segment, sight: Sight) -> torch.Tensor:
        if segment.rule is not SpanRule.WHOLE_PROMPTS or not segment.spans:
            return right(segment, sight)
        if wrong is None:
            seen = right(segment, sight)
            seen[:, : len(segment.slots) - (segment.end - segment.begin)] = False
            return seen
        return right(replace(segment, rule=wrong), sight)

    monkeypatch.setattr(general_backend._Segment, "mask", mask)
    with pytest.raises(CheckpointError, match="paligemma gives other logits in chunks than of a whole prompt"):
        try_out(case.served.folder)


@pytest.mark.parametrize(
    ("of", "wrong"),
    [
        ("ours", {"spans": SpanRule.NOWHERE}),
        ("ours", {"window": 8}),
        ("case", {"spans": SpanRule.EVERYWHERE}),
        ("case", {"softcap": None}),
        ("case", {"softcap": 25.0}),
    ],
)
def test_a_trial_of_our_decoder_tells_other_masks_and_caps(
    of: str, wrong: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: Case = request.getfixturevalue(of)
    assert try_ours(ours.served.folder).spans is SpanRule.WHOLE_PROMPTS
    right = SelfAttention.cache_spec
    monkeypatch.setattr(
        SelfAttention, "cache_spec", lambda part: replace(spec := right(part), kind=otherwise(spec.kind, **wrong))
    )
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours(ours.served.folder)


def test_a_configuration_without_a_processor_is_tried_too() -> None:
    config = transformers().CONFIG_MAPPING["paligemma"]()
    config.get_text_config().vocab_size, config.image_token_id = 64, 63
    assert try_config(config, drawn_prompt).spans is SpanRule.WHOLE_PROMPTS


def test_what_a_processor_sets_into_prompts_is_found(case: Case, tmp_path: Path) -> None:
    assert case.served.found.frame == PromptFrame(behind="<s>", end="\n")
    assert describe(make("llava", tmp_path)).frame is None


def test_a_processor_that_sets_something_else_is_refused(tmp_path: Path) -> None:
    class Shouting(type(processor_of(make("llava", tmp_path)))):  # type: ignore[misc]
        def __call__(self, text: list[str], **options: Any) -> Any:
            return super().__call__(text=[text[0].replace("left", "LEFT")], **options)

    processor = processor_of(tmp_path)
    processor.__class__ = Shouting
    with pytest.raises(CheckpointError, match="Shouting sets something into prompts"):
        frame_of(processor)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A checkpoint without a chat template, as PaliGemma's are."""
    folder = make("paligemma", tmp_path_factory.mktemp("bare"))
    (folder / "chat_template.jinja").unlink()
    return Served.of(folder)


def ids_of(served: Served, prompt: ChatPrompt | TextPrompt | TokenPrompt, count: int) -> list[int]:
    """Of a prompt with so many pictures."""
    pixels = served.prompt([picture(1, 80, 60), "?"]).layout.spans[0].header
    return served.builder.layout(served.builder.pieces(prompt, [Modality.IMAGE] * count), [pixels] * count).ids


@pytest.mark.parametrize("text", ["<image>caption en", "<image>", "See <image> and<image>: which?", "<image>é\n"])
def test_a_text_with_pictures_becomes_transformers_ids(bare: Served, text: str) -> None:
    count = text.count("<image>")
    pictures = [Image.new("RGB", (80, 60))] * count
    processor = Reference(bare.folder).processor
    made = processor(text=[text], images=[pictures], return_tensors="pt")["input_ids"][0].tolist()
    assert ids_of(bare, TextPrompt(text), count) == made
    assert ids_of(bare, TokenPrompt((*bare.builder.encode("a"), 259)), 1)[-1] == 259, "ids are final"


def test_without_a_template_a_conversation_is_one_message_with_its_pictures_first(bare: Served) -> None:
    """As transformers' processor has it of a text that does not say where they are."""
    item = MediaItem(Modality.IMAGE, Key(b""))
    made = Reference(bare.folder).processor(
        text=["caption  en"], images=[[Image.new("RGB", (80, 60))]], return_tensors="pt"
    )
    asked = ChatPrompt((Message("user", ("caption ", item, " en")),))
    assert ids_of(bare, asked, 1) == made["input_ids"][0].tolist()
    marked = ChatPrompt((Message("user", (item, "caption <image> </s>")),))
    assert ids_of(bare, marked, 1).count(259) == 16, "what a user writes is no placeholder"
    for refused in (
        ChatPrompt((Message("system", ("Be short.",)), Message("user", ("Hi",)))),
        ChatPrompt((Message("assistant", ("Hi",)),)),
    ):
        with pytest.raises(InvalidInput, match="has no chat template: a conversation is one message of a user"):
            bare.builder.pieces(refused, [])


def test_a_model_that_was_taught_conversations_needs_its_template(tmp_path: Path) -> None:
    folder = make("llava", tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="the checkpoint has no chat template"):
        PromptBuilder(Checkpoint(folder), ServedModel.by_hf(describe(folder)))


def test_a_trial_tells_scores_without_their_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(PALIGEMMA_2)
    assert try_config(copy.deepcopy(config), drawn_prompt).spans is SpanRule.WHOLE_PROMPTS
    assert try_ours_of(copy.deepcopy(config), drawn_prompt).spans is SpanRule.WHOLE_PROMPTS
    monkeypatch.setattr("llm_service.model_config.text.attention_cap", lambda *_: None)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours_of(copy.deepcopy(config), drawn_prompt)
    monkeypatch.setattr(hf_attention, "AttentionKind", lambda sight, scale, _: AttentionKind(sight, scale))
    with pytest.raises(CheckpointError, match="gives other logits in chunks than of a whole prompt"):
        try_config(copy.deepcopy(config), drawn_prompt)
