"""A part of the first day on a GPU ends in its time, keeps what was reached, and goes on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_day, machine
from benchmarks.tables import Table
from tests.launch import ROOT


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy", lambda: 0.01)


def test_what_failed_is_named_and_run_again_and_the_rest_is_not(tmp_path: Path) -> None:
    good, bad = Table("good", ("-c", "print(1)"), 60.0), Table("bad", ("-c", "raise SystemExit(3)"), 60.0)
    assert gpu_day.run([bad, good], tmp_path, [], 500.0) == ["bad"]
    assert gpu_day.run([Table("bad", ("-c", ""), 60.0), Table("good", ("-c", "1/0"), 60.0)], tmp_path, [], 500.0) == []


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    assert gpu_day.run([Table("late", ("-c", ""), 60.0)], tmp_path, [], 5.0) == ["late"]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tiny", [False, True])
def test_sections_have_names_of_their_own_and_test_files_that_are_there(tiny: bool, tmp_path: Path) -> None:
    sections = [each for part in gpu_day.parts(tmp_path, tiny=tiny).values() for each in part]
    assert len({section.name for section in sections}) == len(sections)
    files = {word.partition("::")[0] for section in sections for word in section.command if "tests/gpu/" in word}
    assert files == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}


@pytest.mark.soak
@pytest.mark.parametrize("part", [3, 4])
def test_a_part_runs_from_end_to_end(part: int, tmp_path: Path) -> None:
    """`make gpu-rehearsal` runs the others as well: of the first two, tests are collected alone, as every run of this
    suite does."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", str(part), str(tmp_path), "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    left = "\n".join(path.read_text() for path in (tmp_path / "tiny").glob("*.failed"))
    assert done.returncode == 0, done.stdout + done.stderr + left
