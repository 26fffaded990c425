"""What a checkpoint's JSON files say of special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.media.item import Modality
from llm_service.prompt.tokens import MediaTokens, end_tokens

MEDIA = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
FAMILY = {"model_type": "qwen3_vl"}


def checkpoint(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint(folder)


def test_media_tokens_are_read() -> None:
    assert MediaTokens.of(FAMILY | MEDIA) == MediaTokens(
        {1: Modality.IMAGE, 2: Modality.VIDEO}, {"vision_start_token_id": 3, "vision_end_token_id": 4}
    )


def test_a_family_whose_videos_have_no_marks_asks_for_none() -> None:
    given = {"model_type": "qwen2_vl", "image_token_id": 1, "video_token_id": 2}
    assert MediaTokens.of(given).marks == {}


@pytest.mark.parametrize("name", MEDIA)
def test_a_missing_media_token_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        MediaTokens.of(FAMILY | {key: value for key, value in MEDIA.items() if key != name})


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {8, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": None}, {7}),
        ({"eos_token_id": 7, "text_config": {"eos_token_id": 6}}, None, {6}),
        ({"eos_token_id": [7, 0]}, {}, {7, 0}),
        ({"text_config": None}, None, set()),
        ({"eos_token_id": [7, -1, 10, 1 << 40]}, None, {7}),
        ({"eos_token_id": -1}, None, set()),
    ],
)
def test_end_tokens_are_taken_from_the_first_file_that_names_any(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, ends: set[int]
) -> None:
    assert end_tokens(checkpoint(tmp_path, config, generation), 10) == ends
