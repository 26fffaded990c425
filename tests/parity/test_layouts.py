"""Layouts of ours in the place of processors that do not say what stands for an item (`common/hf/layouts`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import transformers
from common.hf.models import checked, describe
from common.hf.processors import processor_of
from common.media.item import Grid, Header, Modality
from encoder_service.models.processor import ItemProcessor
from llm_service.model_config.served import ServedModel
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import Span, TextPrompt, TokenPrompt
from tools.models.prompts import picture
from tools.models.tiny import make_without_weights


def laid_out(folder: Path, prompt: TextPrompt | TokenPrompt, count: int) -> tuple[list[int], list[Span]]:
    """Ids and spans by both services, of a prompt with so many pictures."""
    builder, shown = PromptBuilder(Checkpoint(folder), ServedModel.by_hf(describe(folder))), ItemProcessor(folder)
    parts = shown.replacement(np.asarray(picture(1, 60, 40)))
    tokens = sum(part.rows for part in parts)
    header = Header(b"", Modality.IMAGE, Grid(1, 1, tokens), tokens, replacement=parts)
    layout = builder.layout(builder.pieces(prompt, [Modality.IMAGE] * count), [header] * count)
    return list(layout.ids), list(layout.spans)


@pytest.mark.parametrize("places", ["a<imgpad>b<imgpad>c", f"a{'<imgpad>' * 256}b<imgpad>c", f"{'<imgpad>' * 512}"])
def test_one_token_stands_for_a_picture_as_well_as_a_run_of_as_many_as_it_has_rows(tmp_path: Path, places: str) -> None:
    folder = make_without_weights("pp_chart2table", tmp_path)
    whole = places.replace("<imgpad>" * 256, "<imgpad>").replace("<imgpad>", "<imgpad>" * 256)
    own = transformers().AutoProcessor.from_pretrained(folder)
    wanted = own(images=[picture(1, 60, 40)] * 2, text=[whole], return_tensors="pt")["input_ids"][0].tolist()
    ids, spans = laid_out(folder, TextPrompt(places), 2)
    assert ids == wanted
    assert [len(span.runs) for span in spans] == [1, 1]
    assert processor_of(folder)(text=[places], images=[picture(1, 60, 40)] * 2)["input_ids"][0] == wanted
    assert laid_out(folder, TokenPrompt(wanted), 2) == (ids, spans)


def test_a_picture_before_a_question_is_laid_out_as_by_the_processor_that_puts_it_there(tmp_path: Path) -> None:
    folder, shown = make_without_weights("blip-2", tmp_path), [picture(1, 60, 40)]
    asked = "Question: what is it? Answer:"
    wanted = transformers().AutoProcessor.from_pretrained(folder)(images=shown, text=[asked], return_tensors="pt")
    ids = wanted["input_ids"][0].tolist()
    assert laid_out(folder, TextPrompt(f"<image>{asked}"), 1)[0] == ids
    layout = processor_of(folder)
    assert layout(text=[f"<image>{asked}"], images=shown, return_tensors="pt")["input_ids"][0].tolist() == ids
    with pytest.raises(ValueError, match="it takes one picture"):
        layout(text=[f"<image>{asked}"], images=shown * 2)


def test_a_model_that_hears_on_while_it_answers_is_refused() -> None:
    with pytest.raises(CheckpointError, match="hears on while it answers"):
        checked(transformers().CONFIG_MAPPING["voxtral_realtime"]())


def test_a_processor_that_asks_its_own_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ShieldGemma2Processor writes prompts by itself"):
        describe(make_without_weights("shieldgemma2", tmp_path))
