"""Prompts whose rows of all pictures see each other, as Molmo 2's, and are added to what the table of tokens has."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.description import PromptFrame
from common.hf.models import describe
from common.hf.rows import longest_run
from llm_service.engine.messages import Add
from llm_service.engine.prompt import Prompt
from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.sight import SpanRule
from llm_service.model_config.text import TextConfig
from llm_service.models import trial, trial_prompts
from llm_service.models.decoder import Decoder
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.known_text import known_text
from llm_service.models.trial import Finding, try_config, try_ours, try_out
from llm_service.request import SamplingParams
from testkit.hf_side import GREEDY, Served, compare
from tools.models.compare import OURS
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS, TWO, VIDEO, Part, picture
from tools.models.recipes import RECIPES
from tools.models.reference import Reference
from tools.models.tiny import config_of_recipe, make


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make("molmo2", tmp_path_factory.mktemp("molmo2")))


@pytest.mark.soak
def test_ids_and_tokens_are_those_of_transformers(served: Served) -> None:
    assert {"text", "one picture", TWO, VIDEO, OURS} <= compare(served, RECIPES["molmo2"].step_tokens)


@pytest.mark.parametrize("by_hf", [False, True], ids=["by our decoder", "by transformers"])
def test_pictures_beside_others_give_transformers_tokens(served: Served, *, by_hf: bool) -> None:
    asked: list[list[Part]] = [PROMPTS["text"], PROMPTS["one picture"], PROMPTS[TWO]]
    library = Reference(served.folder)
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    engine = served.engine(by_hf=by_hf)
    assert isinstance(engine.decoder, HfDecoder if by_hf else Decoder)
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, asked)), GREEDY)] == expected


def test_what_was_computed_of_media_is_found_again_where_all_of_them_are_the_same(served: Served) -> None:
    """By a prompt that goes on behind the last of them, and not where one more follows."""
    engine, library = served.engine(prefix_cache=True), Reference(served.folder)
    first: list[Part] = [picture(1, 120, 90), "What is it? Is it a map of the moon?"]
    asked: list[tuple[list[Part], bool]] = [
        (first, False),
        ([picture(1, 120, 90), "What is it? Is it a map of the moon, or of the sun?"], True),
        ([*first, " And this: ", picture(2, 64, 60)], False),
        ([picture(3, 120, 90), "What is it? Is it a map of the moon?"], False),
        (first, True),
    ]
    for parts, found in asked:
        given = library.inputs(parts)
        (outcome,) = engine.run([served.prompt(parts)], GREEDY)
        assert outcome.tokens == library.tokens(given)
        behind = np.flatnonzero(np.isin(given["input_ids"][0].numpy(), served.found.together))[-1]
        assert (outcome.cached > behind) == found
        assert outcome.cached == 0 or found


def test_its_processor_begins_a_text_that_does_not_begin_so(served: Served) -> None:
    assert served.found.frame == PromptFrame(begin="<s>", always=True, once=True)


def test_a_trial_tells_other_masks_and_rows(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for tried in (try_out, try_ours):
        assert tried(served.folder) == Finding(SpanRule.ALL_MEDIA, adds_rows=True)
    monkeypatch.setattr(trial, "runs_of", lambda _: [(0, 2)])
    with pytest.raises(CheckpointError, match="molmo2 gives other logits in chunks than of a whole prompt"):
        try_out(served.folder)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours(served.folder)


def test_a_trial_knows_no_more_of_the_tokens_of_media_than_what_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_prompts, "together_of", lambda _: ())
    with pytest.raises(CheckpointError, match="molmo2 gives other logits in chunks than of a whole prompt"):
        try_out(served.folder)


def test_a_configuration_without_a_processor_is_tried_too() -> None:
    assert try_config(config_of_recipe("molmo2"), drawn_prompt).spans is SpanRule.ALL_MEDIA


def test_room_is_for_all_that_stands_for_a_picture(served: Served) -> None:
    rows = sum(part.rows for part in served.processor.replacement(np.zeros((1568, 1568, 3), np.uint8)))
    assert longest_run(served.folder, with_marks=True) > rows > longest_run(served.folder) > 0


def test_a_prompt_is_whole_up_to_its_last_mark() -> None:
    def prompt(ids: list[int]) -> Prompt:
        tokens = array("i", ids)
        places = np.tile(np.arange(len(ids), dtype=np.int32), (3, 1)).tobytes()
        fields = {"mrope_delta": 0, "items": [], "salt": "", "priority": 0, "deadline": None}
        add = Add(id=1, token_ids=tokens.tobytes(), positions=places, sampling=SamplingParams(max_tokens=4), **fields)  # type: ignore[arg-type]
        return Prompt.of(add, ChunkRule(SpanRule.ALL_MEDIA, (7, 8)))

    one, longer, other, text = (prompt(ids) for ids in ([1, 7, 8, 2], [1, 7, 8, 3, 4], [1, 7, 8, 2, 8], [1, 2, 3]))
    assert [each.whole_end for each in (one, longer, other, text)] == [3, 3, 5, 0]
    assert one.root == longer.root != other.root
    assert one.without_partial_media(0, 2, 99) == 0
    assert one.without_partial_media(0, 3, 99) == 3


def test_a_text_with_norms_over_all_heads_is_that_of_transformers(tmp_path: Path) -> None:
    """Molmo 2 over OLMo has them, and other norms of layers."""
    folder = make("molmo2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"qk_norm_type": "olmo"}
    (folder / "config.json").write_text(json.dumps(config))
    with capture_logs() as told:
        assert known_text(Checkpoint(folder), describe(folder)) is None
    assert [line["cause"] for line in told] == [
        "layers.0.self_attn.q_norm.weight does not fit the model: it is (64,), expected (16,)"
    ]


def test_rotary_positions_that_are_scaled_in_some_layers_alone_are_refused() -> None:
    text = config_of_recipe("molmo2").text_config.to_dict()
    text["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert TextConfig.of(text).table_rows == text["vocab_size"] + text["additional_vocab_size"]
    with pytest.raises(CheckpointError, match="rotary positions that are scaled in some layers alone"):
        TextConfig.of({**text, "rope_scaling_layers": [1]})
