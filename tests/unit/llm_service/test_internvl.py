"""How InternVL's items stand in a prompt, and whose its text is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.media.encoder_digest import INTERNVL_TEXTS
from common.media.item import Grid, Header, Modality
from encoder_service.families import registry as encoder_registry
from llm_service.families import registry
from llm_service.families.family import Rows, SpecialToken
from llm_service.families.internvl import INTERNVL
from llm_service.model_config.text import TextConfig
from llm_service.prompt.mrope import MediaLayout, positions
from llm_service.prompt.tokens import MediaTokens, named_tokens
from llm_service.request import MediaRun, Span

START, END = SpecialToken("start_image_token"), SpecialToken("end_image_token")


def test_a_picture_s_rows_stand_between_two_marks() -> None:
    header = Header(b"", Modality.IMAGE, Grid(1, 96, 32), 768)
    assert list(INTERNVL.modalities[Modality.IMAGE].expand(header)) == [START, Rows(768), END]


def test_each_frame_of_a_video_is_a_line() -> None:
    header = Header(b"", Modality.VIDEO, Grid(2, 32, 32), 512, timestamps=(0.0, 1.0))
    frame = (START, Rows(256, "image_token_id"), END)
    assert list(INTERNVL.modalities[Modality.VIDEO].expand(header)) == ["Frame1: ", *frame, "\nFrame2: ", *frame]


def test_rows_count_on_and_those_that_are_kept_stand_where_they_would_without() -> None:
    header = Header(b"", Modality.VIDEO, Grid(2, 4, 4), 5, grid_rows=8, kept_rows=bytes([0b10001111]))
    layout = MediaLayout(2, INTERNVL.modalities, 0.0)
    where, delta = positions(range(9), [Span(0, header, (MediaRun(1, 0, 4, 4), MediaRun(7, 4, 1, 4)))], layout)
    assert np.array_equal(where, [[0, 1, 2, 3, 4, 5, 6, 10, 11]] * 3)
    assert delta == 3


@pytest.mark.parametrize("text", sorted(INTERNVL_TEXTS))
def test_its_text_says_what_layers_have(text: str) -> None:
    config = {"model_type": "internvl", "text_config": {"model_type": text}}
    found, alone = registry.family_of(config), registry.TEXT_FAMILIES[text]
    assert (found.attention.bias, found.attention.qk_norm) == (alone.attention.bias, alone.attention.qk_norm)
    assert found.encoder == encoder_registry.family_of(config).parts


def test_both_services_leave_a_text_that_no_family_is_for_to_transformers() -> None:
    for config in ({"model_type": "internvl", "text_config": {"model_type": "gpt_oss"}}, {"model_type": "internvl"}):
        assert registry.find_family(config) is encoder_registry.find_family(config) is None
        with pytest.raises(CheckpointError, match="internvl is not supported"):
            registry.family_of(config)


def test_rotary_scaling_beyond_the_longest_context_is_as_none() -> None:
    text = {
        "model_type": "qwen2",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 512,
    }
    found = TextConfig.of({"model_type": "internvl", "text_config": text})
    assert (found.rotary.theta, found.max_context(0), found.max_context(4096)) == (1e6, 512, 512)


def test_tokens_that_config_json_lacks_are_named_by_the_tokenizer(tmp_path: Path) -> None:
    names = {"start_image_token": "<img>", "end_image_token": {"content": "</img>"}, "eos_token": "elsewhere"}
    settings = {**names, "extra_special_tokens": {"video_token": "<video>"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    named = named_tokens(Checkpoint(tmp_path), {"<img>": 1, "</img>": 2, "<video>": 3, "<other>": 4})
    assert named == {"start_image_token": 1, "end_image_token": 2, "video_token": 3}
    found = MediaTokens.of({"image_token_id": 9}, INTERNVL, named)
    assert found.placeholders == {9: Modality.IMAGE, 3: Modality.VIDEO}
    assert found.marks == {"start_image_token": 1, "end_image_token": 2, "image_token_id": 9}
    with pytest.raises(CheckpointError, match="video_token"):
        MediaTokens.of({"image_token_id": 9}, INTERNVL, {})
