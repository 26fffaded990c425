"""The page of the library's models: which of its rows a run changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_service.families.family import SpanRule
from tools.models import __main__ as models
from tools.models.__main__ import Row, _among


def test_a_run_for_one_kind_changes_no_other_row_that_the_page_has() -> None:
    old, new = Row("aria", "refused", "old"), Row("aria", "library", "compared", "our decoder")
    asked, missing = Row("llava", "library"), Row("fuyu", "refused")
    kept = {"aria": old, "llava": asked, "fuyu": missing}
    told = {"aria": new, "llava": Row("llava", "refused")}
    assert _among(kept, told, ["llava"]) == {"aria": new, "llava": asked, "fuyu": missing}


def test_a_package_that_a_checkpoint_cannot_be_made_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> Path:
        raise ImportError("Features requires the torchaudio library but it was not found in your environment.")

    monkeypatch.setattr(models, "_text_by", lambda *_: ("library", SpanRule.NOWHERE))
    monkeypatch.setattr(models, "make", lacking)
    (row,) = models.rows(["granite_speech"], models.by_services)
    assert row == Row("granite_speech", "unknown", "the library wants a package that is not installed here: torchaudio")
