"""What sampling is like where requests do not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.config import LlmConfig
from llm_service.generation_config import SamplingDefaults, read

OWN = {"temperature": 0.7, "top_k": 20.0, "repetition_penalty": 1.05, "max_new_tokens": 512}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(OWN))
    return Checkpoint(tmp_path)


def test_it_is_the_checkpoint_s_nobody_s_or_that_of_a_folder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    own = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 512}
    assert read(checkpoint, "auto", None) == SamplingDefaults(own)
    assert read(checkpoint, "none", None) == SamplingDefaults()
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"do_sample": false, "top_p": 0.5}')
    assert read(checkpoint, str(other), None) == SamplingDefaults({"temperature": 0.0, "top_p": 0.5})
    (other / "generation_config.json").write_text('{"max_new_tokens": 40.0}')
    assert read(checkpoint, str(other), None) == SamplingDefaults({"max_tokens": 40}, 40)
    assert read(checkpoint, str(other), {"max_new_tokens": 50}) == SamplingDefaults({"max_tokens": 50}, 50)
    assert read(checkpoint, "none", {"max_new_tokens": 50}) == SamplingDefaults({"max_tokens": 50}, 50)
    (other / "generation_config.json").write_text('{"max_new_tokens": -1}')
    assert read(checkpoint, str(other), None) == SamplingDefaults()


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_folder_without_such_a_file_is_refused(checkpoint: Checkpoint, tmp_path: Path, text: str | None) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if text is not None:
        (other / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"^--generation-config: .*generation_config.json cannot be read: "):
        read(checkpoint, str(other), None)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"temperature": 0.2}, {"temperature": 0.2, "top_k": 20, "repetition_penalty": 1.05}),
        ({"do_sample": False}, {"temperature": 0.0, "top_k": 20, "repetition_penalty": 1.05}),
        (
            {"max_new_tokens": 9, "top_k": 0},
            {"temperature": 0.7, "top_k": 0, "repetition_penalty": 1.05, "max_tokens": 9},
        ),
    ],
)
def test_what_the_operator_says_goes_before_it(
    checkpoint: Checkpoint, override: dict[str, Any], expected: dict[str, Any]
) -> None:
    LlmConfig(model="folder", override_generation_config=override).validate()
    found = read(checkpoint, "auto", override)
    assert found == SamplingDefaults({"max_tokens": 512} | expected, expected.get("max_tokens"))


def test_a_temperature_of_the_operator_s_goes_before_a_checkpoint_s_that_does_not_sample(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 1.0}')
    assert read(Checkpoint(tmp_path), "auto", {"temperature": 0.5}).values == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ({"beams": 4}, "beams is not one of temperature, top_p,"),
        ({"max_tokens": 4}, "max_tokens is not one of"),
        ({"temperature": -1}, "temperature must be between 0.0 and 100.0"),
        ({"temperature": float("nan")}, "temperature must be between 0.0 and 100.0"),
        ({"top_p": 0}, "top_p must be above 0.0, and at most 1.0"),
        ({"top_k": 1.5}, "top_k must be a whole number between 0 and"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number between 1 and"),
        ({"top_p": "1"}, "top_p must be above 0.0"),
        ({"do_sample": 0}, "do_sample is true or false"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample false and a temperature exclude each other"),
    ],
    ids=str,
)
def test_what_would_be_ignored_or_is_out_of_range_ends_the_start(override: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^--override-generation-config: {why}"):
        LlmConfig(model="folder", override_generation_config=override).validate()
