"""The page of models, docs/MODELS.md: its rows are what transformers has, and what was compared."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import CheckpointError
from common.hf import classes as hf_classes
from llm_service.families.registry import TEXT_FAMILIES
from llm_service.model_config.text import TextConfig
from tools.models.__main__ import Row, kinds, text_by
from tools.models.__main__ import main as tools_models
from tools.models.compare import OURS
from tools.models.tiny import config_of_recipe

PAGE = Path(__file__).resolve().parents[2] / "docs/MODELS.md"
ROWS = [row for row in map(Row.read, PAGE.read_text().splitlines()) if row is not None]


def test_the_page_of_models_has_each_that_transformers_has() -> None:
    listed = re.findall(r"^\| ([\w.-]+) \| (?:native|transformers|refused|unknown) \|", PAGE.read_text(), re.MULTILINE)
    known = [made.model_type for made in hf_classes.transformers().AutoModelForImageTextToText._model_mapping]
    assert listed[: len(known)] == known
    alone = listed[len(known) :]
    assert alone == sorted(alone)
    assert {"audioflamingo3", "glmasr", "phi4_multimodal", "qwen2_audio", "qwen3_asr", "voxtral"} <= {*alone}


def test_the_page_of_models_says_whose_decoder_computes_each_text() -> None:
    assert [row.kind for row in ROWS] == kinds()
    assert all((row.text in (OURS, "transformers")) == (row.how in ("native", "transformers")) for row in ROWS)
    assert all(row.text == OURS for row in ROWS if row.how == "native")
    for row in ROWS:
        if row.how == "transformers":
            text = json.loads(config_of_recipe(row.kind).get_text_config(decoder=True).to_json_string(use_diff=False))
            assert (row.text == OURS) == _is_known(text), row


@pytest.mark.soak  # a second for each kind
@pytest.mark.parametrize("kind", [row.kind for row in ROWS if row.how == "transformers"])
def test_what_the_page_calls_served_passes_its_trial(kind: str) -> None:
    """With transformers that is installed, which may be another than that of the row."""
    assert text_by(kind, hf_classes.transformers().CONFIG_MAPPING[kind])[0] == OURS


def _is_known(text: dict[str, Any]) -> bool:
    """Whether our decoder has all that a text's configuration asks for."""
    if text["model_type"] not in TEXT_FAMILIES:
        return False
    try:
        TextConfig.of(text)
    except CheckpointError:
        return False
    return True


def test_rows_of_kinds_that_are_asked_for_again_go_among_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    was = "| blip | refused |  | blip does"
    assert was in PAGE.read_text()
    page.write_text(PAGE.read_text().replace(was, "| blip | refused |  | long ago blip did"))
    monkeypatch.setattr("sys.argv", ["", str(page), "--only", "blip", "--kept", str(tmp_path / "kept.jsonl")])
    tools_models()
    assert page.read_text() == PAGE.read_text()
    page.write_text(page.read_text().replace(f"transformers {version('transformers')} ", "transformers 5.1.0 "))
    tools_models()
    rows = {row.kind: row for row in map(Row.read, page.read_text().splitlines()) if row is not None}
    assert rows["blip"].release == version("transformers")
    assert all(row.release != version("transformers") for row in rows.values() if row.kind != "blip")
    assert f"transformers {version('transformers')} has" in page.read_text()
    assert f"{len(rows) - 1} with an earlier release" in page.read_text()
