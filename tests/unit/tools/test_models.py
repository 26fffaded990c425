"""The page of transformers' models: which of its rows a run changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from llm_service.families.sight import SpanRule
from tools.models import __main__ as models
from tools.models.__main__ import Row


def test_a_run_for_one_kind_changes_no_other_row_that_the_page_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Row("aria", "refused", "old"), Row("aria", "transformers", "compared", "our decoder")
    asked, missing = Row("llava", "transformers", text="transformers"), Row("fuyu", "refused", "why")
    page, kept = tmp_path / "page.md", tmp_path / "kept.jsonl"
    page.write_text(models.page([new, Row("llava", "refused")]))
    kept.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in (old, missing)))
    monkeypatch.setattr(models, "kinds", lambda: ["aria", "llava", "fuyu"])
    monkeypatch.setattr(models, "rows", lambda kinds, _: [asked] if kinds == ["llava"] else [])
    monkeypatch.setattr("sys.argv", ["", str(page), "--only", "llava", "--kept", str(kept)])
    models.main()
    assert [row for row in map(Row.read, page.read_text().splitlines()) if row] == [new, asked, missing]


def test_a_kind_that_would_be_served_wrongly_keeps_no_row_that_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "kept.jsonl"
    before = models.page([Row("aria", "transformers", "compared", "our decoder"), Row("llava", "refused")])
    page.write_text(before)
    monkeypatch.setattr(models, "kinds", lambda: ["aria", "llava"])
    monkeypatch.setattr(models, "rows", lambda *_: [Row("aria", models.WRONG), Row("llava", "transformers")])
    monkeypatch.setattr("sys.argv", ["", str(page), "--kept", str(kept)])
    with pytest.raises(SystemExit, match="answer otherwise"):
        models.main()
    assert page.read_text() == before, "no page says that all was found again"


def test_rows_that_were_kept_without_a_release_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "kept.jsonl"
    kept.write_text('{"kind": "aria", "how": "refused", "note": "long ago", "text": ""}\n')
    asked: list[str] = []
    monkeypatch.setattr(models, "kinds", lambda: ["aria"])
    monkeypatch.setattr(models, "rows", lambda kinds, _: asked.extend(kinds) or [Row("aria", "transformers")])
    monkeypatch.setattr("sys.argv", ["", str(page), "--kept", str(kept)])
    models.main()
    assert asked == ["aria"]
    assert "long ago" not in page.read_text()


def test_a_package_that_a_checkpoint_cannot_be_made_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> Path:
        raise ImportError("Features requires the torchaudio library but it was not found in your environment.")

    monkeypatch.setattr(models, "text_by", lambda *_: ("transformers", SpanRule.NOWHERE))
    monkeypatch.setattr(models, "make", lacking)
    (row,) = models.rows(["granite_speech"], models.by_services)
    assert row == Row(
        "granite_speech", "unknown", "transformers needs a package that is not installed here: torchaudio"
    )
