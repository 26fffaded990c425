"""The page of the library's models: which of its rows a run changes."""

from __future__ import annotations

from tools.models.__main__ import Row, _among


def test_a_run_for_one_kind_changes_no_other_row_that_the_page_has() -> None:
    old, new = Row("aria", "refused", "old"), Row("aria", "library", "compared", "our decoder")
    asked, missing = Row("llava", "library"), Row("fuyu", "refused")
    kept = {"aria": old, "llava": asked, "fuyu": missing}
    told = {"aria": new, "llava": Row("llava", "refused")}
    assert _among(kept, told, ["llava"]) == {"aria": new, "llava": asked, "fuyu": missing}
