"""Prompts whose rows of all pictures see each other, as Molmo 2's, and are added to what the table of tokens has."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from torch import Tensor

from common.checkpoint import CheckpointError
from common.library import PromptFrame
from common.library_models import longest_run
from llm_service.engine.messages import Add
from llm_service.engine.prompt import Prompt
from llm_service.families.family import SpanRule
from llm_service.models import library_decoder, trial
from llm_service.models.trial import Finding, drawn_prompt, try_config, try_out
from llm_service.request import SamplingParams
from tests.parity.library_side import GREEDY, Served, compare
from tools.models.compare import TWO, VIDEO, Part, Reference, picture
from tools.models.recipes import RECIPES
from tools.models.tiny import config_of_recipe, make


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make("molmo2", tmp_path_factory.mktemp("molmo2")))


@pytest.mark.soak
def test_ids_and_tokens_are_the_library_s(served: Served) -> None:
    assert {"text", "one picture", TWO, VIDEO} <= compare(served, RECIPES["molmo2"].step_tokens)


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
    assert try_out(served.folder) == Finding(SpanRule.ALL_MEDIA, adds_rows=True)
    right = library_decoder._in_spans

    def none_in_spans(*given: object) -> Tensor | None:
        there = right(*given)  # type: ignore[arg-type]
        return None if there is None else there & False

    monkeypatch.setattr(library_decoder, "_in_spans", none_in_spans)
    with pytest.raises(CheckpointError, match="molmo2 gives other logits in chunks than of a whole prompt"):
        try_out(served.folder)


def test_a_trial_knows_no_more_of_the_tokens_of_media_than_what_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "together_of", lambda _: ())
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
        return Prompt.of(add, whole=True, whole_until=(7, 8))

    one, longer, other, text = (prompt(ids) for ids in ([1, 7, 8, 2], [1, 7, 8, 3, 4], [1, 7, 8, 2, 8], [1, 2, 3]))
    assert [each.whole_end for each in (one, longer, other, text)] == [3, 3, 5, 0]
    assert one.root == longer.root != other.root
    assert one.without_partial_media(0, 2, 99) == 0
    assert one.without_partial_media(0, 3, 99) == 3
