"""Collects tests in less time: every process of a suite collects all of them, in a fresh clone from source."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
PROMPT = b">>> "


class Examples:
    """Only files with an example in a docstring are searched for those: each of the others would be imported and
    looked through, member by member."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        if file_path.suffix != ".py" or not found or PROMPT in file_path.read_bytes():
            return found
        return [each for each in found if type(each).__name__ != "DoctestModule"]


def rewrite_a_share(config: pytest.Config) -> None:
    """Has this process rewrite the asserts of some files of tests, as pytest does when it imports them: of those that
    run side by side each has others, so that each finds the most of them rewritten. Where pytest does it in another
    way, as its next release may, it does so by itself."""
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    if given is None:
        return
    number, of = int(given["workerid"].removeprefix("gw")), given["workercount"]
    with contextlib.suppress(ImportError, AttributeError, KeyError, TypeError):
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for path in sorted(TESTS.rglob("test_*.py"))[number::of]:
            kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
            if not kept.exists() and rewrite.try_makedirs(kept.parent):
                made, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, made, kept)
