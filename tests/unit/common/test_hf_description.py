"""What is said of a release of transformers that is too old, before it is asked anything."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf import description as hf_description
from tests.launch import ROOT


def test_a_library_that_is_too_old_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "some_kind"}')
    monkeypatch.setattr(metadata, "version", lambda _: "5.17.0")
    monkeypatch.setattr(hf_description, "run", lambda *_, **__: pytest.fail("nobody is asked"))
    said = (
        r"^some_kind needs transformers, version 5\.23 or later, and this is 5\.17\.0: install it with .*transformers"
    )
    with pytest.raises(CheckpointError, match=said):
        hf_description.describe(Checkpoint(tmp_path))


def test_its_least_version_is_what_an_install_asks_for() -> None:
    (asked,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["transformers"]
    assert asked == f"transformers>={'.'.join(map(str, hf_description.LEAST))}"
