"""What benchmarks ask for is new, unless it is called repeated, and the same for every engine."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from benchmarks.sides import Job
from benchmarks.workload import (
    CONCURRENT,
    Mark,
    Plan,
    Question,
    new_picture,
    new_text,
    photograph,
    picture,
    renamed,
)
from tests.launch import ROOT


def asked_as_new(plan: Plan) -> list[Question]:
    """Every question of a plan that should be new, the warm-up's included."""
    rounds = [questions for several in plan.together.values() for questions in several]
    return [*plan.warm_up, *plan.first, *plan.long, *(question for questions in rounds for question in questions)]


def test_no_question_of_a_run_comes_twice_in_warm_ups_rounds_rows_or_starts() -> None:
    asked = [question for _ in range(2) for question in asked_as_new(Plan.new(runs=6))]
    assert len(asked) == 2 * (2 + 6 + 6 + 2 * sum(CONCURRENT))
    assert len({question.picture for question in asked}) == len(asked)
    assert len({question.text for question in asked}) == len(asked)


def test_what_is_called_repeated_is() -> None:
    plan = Plan.new(runs=3)
    assert list(plan.repeated_prompts) == plan.first
    assert [question.picture for question in plan.repeated_pictures] == [question.picture for question in plan.first]
    assert {question.text for question in plan.repeated_pictures}.isdisjoint(question.text for question in plan.first)


def test_pictures_of_two_marks_differ_in_their_files_and_in_their_pixels() -> None:
    marks = [Mark.new() for _ in range(3)]
    marks += [Mark(marks[0].run, marks[0].number + 60), Mark(marks[0].run + 1, marks[0].number)]  # cut alike
    files = [picture(mark, 224) for mark in marks]
    assert len(set(files)) == len(files)
    assert len({Image.open(io.BytesIO(file)).tobytes() for file in files}) == len(files)


def test_a_mark_makes_the_same_file_in_another_process() -> None:
    mark = Mark.new()
    program = (
        "import sys; from benchmarks.workload import *; sys.stdout.buffer.write(picture(Mark.read(sys.argv[1]), 96))"
    )
    other = subprocess.run([sys.executable, "-c", program, str(mark)], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert other.stdout == picture(mark, 96)


def test_another_process_makes_up_other_marks() -> None:
    program = "from benchmarks.workload import *; print(Mark.new())"
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert Mark.read(other.stdout.strip()).run != Mark.new().run


def test_a_mark_survives_being_written_and_texts_are_of_one_length() -> None:
    assert Mark.read(str(Mark(7, 12))) == Mark(7, 12)
    assert len(str(Mark(7, 12))) == len(str(Mark(999_999_999, 999_999)))
    assert len({len(new_text()) for _ in range(3)}) == 1


def test_a_text_is_new_from_its_first_word() -> None:
    assert len({new_text().split()[0] for _ in range(5)}) == 5


def test_new_pictures_are_as_large_as_asked_for() -> None:
    assert Image.open(io.BytesIO(new_picture(112))).size == (112, 112)
    assert photograph(Mark.new()).size == (448, 448)


def test_a_renamed_file_has_other_bytes_and_the_same_pixels() -> None:
    file = new_picture(96)
    other, third = renamed(file), renamed(file)
    assert len({file, other, third}) == 3
    before, after = (np.asarray(Image.open(io.BytesIO(each))) for each in (file, other))
    assert (before == after).all()


def test_a_plan_reaches_a_peers_process_as_it_is() -> None:
    job = Job(Plan.new(runs=2), tokens=8)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_every_benchmark_says_what_is_new_in_it_and_what_is_repeated(path: Path) -> None:
    said = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    if said.startswith("`python -m benchmarks") and "measures nothing" not in said:
        assert " new" in said or "*repeated*" in said
        assert "hits" in said or "cache" in said
