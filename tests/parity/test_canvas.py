"""Where tokens are of pictures that are shown in slices, on a canvas, and whose numbers stand before them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.hf.classes import config_of
from common.hf.models import checked, describe
from common.hf.positions import rope_positions
from common.hf.processors import processor_of
from common.media.item import Grid, Header, Modality
from encoder_service.models.processor import ItemProcessor
from llm_service.model_config.served import ServedModel
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import TextPrompt
from tools.models.prompts import picture
from tools.models.tiny import make_without_weights

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # transformers' processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_without_weights("minicpmv4_7", tmp_path_factory.mktemp("canvas"))


@pytest.mark.parametrize(
    "text",
    [
        "See <image>\n\nand <image>\n<image>\nWhat?",  # in three rows of slices, in one, in none
        "<image><image><image>",
    ],
)
def test_tokens_of_pictures_in_slices_are_where_transformers_has_them(folder: Path, text: str) -> None:
    shown = [picture(5, 150, 240), picture(6, 230, 40), picture(7, 50, 50)]
    made = processor_of(folder)(text=[text], images=shown, return_tensors="pt")
    found, own = describe(folder), ItemProcessor(folder)
    builder = PromptBuilder(Checkpoint(folder), ServedModel.by_hf(found))
    headers = []
    for each in shown:
        parts = own.replacement(np.asarray(each))
        tokens = sum(part.rows for part in parts)
        headers.append(Header(b"", Modality.IMAGE, Grid(1, 1, tokens), tokens, replacement=parts))
    layout = builder.layout(builder.pieces(TextPrompt(text), [Modality.IMAGE] * 3), headers)
    assert layout.ids == made["input_ids"][0].tolist()
    positions = rope_positions(checked(config_of(folder)).base_model, made).numpy()
    assert np.frombuffer(layout.positions, "<i4").reshape(3, -1).tolist() == positions.tolist()
    assert layout.mrope_delta == positions.max() + 1 - len(layout.ids)
