"""What a trial of a text finds out at the start, and what it tells from what is not so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf import models as hf_models
from llm_service.families.sight import ALL_BEFORE, SpanRule
from llm_service.layers.attention import general_backend
from llm_service.layers.sparse_attention import index as index_keys
from llm_service.models import trial, trial_chunks, trial_reference
from llm_service.models.hf import attention as hf_attention
from llm_service.models.hf import decoder as hf_decoder
from llm_service.models.hf.loader import load_hf_decoder
from llm_service.models.trial import try_config, try_out
from llm_service.models.trial_prompts import TrialPrompt
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe, make


def test_a_trial_finds_spans_and_tells_other_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("gemma3", tmp_path)
    assert try_out(folder).spans is SpanRule.EVERYWHERE
    right = general_backend._Segment.mask
    monkeypatch.setattr(general_backend._Segment, "mask", lambda segment, _: right(segment, ALL_BEFORE))
    with pytest.raises(CheckpointError, match="gemma3 gives other logits in chunks"):
        try_out(folder)


@pytest.mark.parametrize("what", ["chunks", "tempering"])
def test_a_trial_tells_what_llama_4_wants_of_attention(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_recipe("llama4")
    assert try_config(config, drawn_prompt).spans is SpanRule.NOWHERE
    if what == "chunks":
        monkeypatch.setattr(hf_attention, "chunk_of", lambda _: None)
    else:
        monkeypatch.setattr(hf_decoder, "take_tempering", lambda _: ())
    with pytest.raises(CheckpointError, match="llama4 gives other logits in chunks"):
        try_config(config_of_recipe("llama4"), drawn_prompt)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["fewer", "all"])
def test_a_trial_tells_what_an_index_chooses(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_config(config_of_recipe("mistral_large4"), drawn_prompt).spans is SpanRule.NOWHERE
    if what == "fewer":
        right = index_keys.best
        monkeypatch.setattr(index_keys, "best", lambda scores, seen, most: right(scores, seen, most - 1))
    else:
        monkeypatch.setattr(general_backend, "choose", lambda *_: None)
    with pytest.raises(CheckpointError, match="mistral_large4 gives other logits in chunks"):
        try_config(config_of_recipe("mistral_large4"), drawn_prompt)


def test_a_checkpoint_whose_trial_fails_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is only where the trial looks, so nothing else of loading tells."""
    folder = make("llava", tmp_path)
    checkpoint, found, cpu = Checkpoint(folder), hf_models.describe(folder), torch.device("cpu")
    assert load_hf_decoder(checkpoint, found, torch.float32, cpu).spans is SpanRule.NOWHERE
    right = trial_chunks.PagedChunk
    monkeypatch.setattr(trial_chunks, "PagedChunk", lambda context, *others: right(max(0, context - 1), *others))
    with pytest.raises(CheckpointError, match="llava gives other logits in chunks than of a whole prompt: they differ"):
        load_hf_decoder(checkpoint, found, torch.float32, cpu)


def test_tokens_that_a_model_does_not_let_say_hide_no_other_difference() -> None:
    least = torch.finfo(torch.float32).min
    expected = torch.tensor([[least, 2.0, -4.0]])
    assert trial._relative(torch.tensor([[least, 2.0, -4.0]]), expected) == 0.0
    assert trial._relative(torch.tensor([[least, 1.0, -4.0]]), expected) == 0.25
    assert trial._relative(torch.tensor([[0.0, 2.0, -4.0]]), expected) == math.inf
    assert math.isnan(trial._relative(torch.tensor([[least, torch.nan, -4.0]]), expected))


def test_levels_of_rows_are_tried_at_layers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("granite4_vision", tmp_path)
    assert hf_models.describe(folder).levels == 6
    assert try_out(folder).spans is SpanRule.NOWHERE
    monkeypatch.setattr(hf_decoder, "layers_of_levels", lambda _: [0, 1, 2, 3, 5, 4])
    with pytest.raises(CheckpointError, match="granite4_vision gives other logits in chunks"):
        try_out(folder)


def test_a_model_that_answers_by_another_mask_than_it_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its prompt in sight and forgets its answer, which no prompt in chunks would show, if that is not known
    of it."""
    config = config_of_recipe("unlimited_ocr")
    monkeypatch.setattr(hf_attention, "answer_window_of", lambda _: None)
    with pytest.raises(CheckpointError, match="sees other tokens while it answers"):
        try_config(config, drawn_prompt)


def test_layers_with_states_are_refused() -> None:
    config = config_of_recipe("lfm2_vl")
    with pytest.raises(CheckpointError, match="layers keep states"):
        try_config(config, drawn_prompt)


def test_a_trial_tells_a_sound_whose_rows_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompted(model: Any) -> TrialPrompt:
        return replace(drawn_prompt(model), sounds=True)

    assert try_config(config_of_recipe("gemma3"), prompted).spans is SpanRule.EVERYWHERE
    monkeypatch.setattr(trial_reference, "_SOUND", 1)  # a picture's, whose rows do
    with pytest.raises(CheckpointError, match="gemma3 gives other logits of a sound in chunks than at once"):
        try_config(config_of_recipe("gemma3"), prompted)


def test_a_token_of_padding_is_seen_where_a_prompt_has_it() -> None:
    """transformers would mask it as it generates, unless it is told."""
    config: Any = config_of_recipe("llava")
    config.text_config.pad_token_id = config.pad_token_id = 5
    assert try_config(config, drawn_prompt).spans is SpanRule.NOWHERE
