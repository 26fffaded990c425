"""A part of the first day on a GPU ends in its time, keeps what was reached, and goes on where it stopped."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day, machine, tables
from benchmarks.tables import Table
from llm_service.layers.cpu import panel_kernel, quantized_kernel
from testkit import forkserver
from testkit.forkserver import Imports
from tests.launch import ROOT


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy", lambda: 0.01)


def test_what_failed_is_named_and_run_again_and_the_rest_is_not(tmp_path: Path) -> None:
    good, bad = Table("good", ("-c", "print(1)"), 60.0), Table("bad", ("-c", "raise SystemExit(3)"), 60.0)
    assert gpu_day.run([bad, good], tmp_path, [], 500.0) == ["bad"]
    assert gpu_day.run([Table("bad", ("-c", ""), 60.0), Table("good", ("-c", "1/0"), 60.0)], tmp_path, [], 500.0) == []


def test_what_has_failed_is_run_again_behind_what_has_not_been_tried(tmp_path: Path) -> None:
    sections = [Table(name, ("-c", ""), 60.0) for name in ("first", "second", "third", "last")]
    for name in ("first", "third"):
        (tmp_path / f"{name}.failed").touch()
    assert [each.name for each in gpu_day.untried_first(sections, tmp_path)] == ["second", "last", "first", "third"]


def test_the_last_words_of_what_failed_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_day.run(
        [Table("bad", ("-c", "print('first ' * 99); raise SystemExit('last words')"), 60.0)], tmp_path, [], 500.0
    )
    assert capsys.readouterr().out.splitlines()[-1] == "    last words"


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    assert gpu_day.run([Table("late", ("-c", ""), 60.0)], tmp_path, [], 5.0) == ["late"]
    assert not any(tmp_path.iterdir())


def test_each_section_s_words_are_packed_at_once(tmp_path: Path) -> None:
    archive, seen = tmp_path / "archive", "import tarfile; print(sorted(tarfile.open('archive').getnames()))"
    folder = tmp_path / "results"
    folder.mkdir()
    program = seen.replace("'archive'", repr(str(archive)))
    sections = [Table("first", ("-c", "print(1)"), 60.0), Table("second", ("-c", program), 60.0)]
    assert gpu_day.run(sections, folder, [], 500.0, archive) == []
    assert (folder / "second.md").read_text().splitlines()[-1] == "['first.md']"
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["first.md", "second.md"]


def test_a_section_that_does_not_fit_is_left_to_the_next_call(tmp_path: Path) -> None:
    first, long = Table("first", ("-c", ""), 400.0), Table("long", ("-c", ""), 501.0)
    short = Table("short", ("-c", ""), 60.0)
    assert gpu_day.run([first, long, short], tmp_path, [], 500.0) == ["long"]
    assert gpu_day.run([first, long, short], tmp_path, [], 500.0) == [], "alone it has what time there is"


def test_an_answer_is_tried_first_then_kernels_and_services_before_tests(tmp_path: Path) -> None:
    names = [section.name for part in gpu_day.parts(tmp_path, tiny=False).values() for section in part]
    assert names[:2] == ["first", "kernels"]
    assert names.index("services") < names.index("profile") < names.index("test_native") < names.index("sanitizer")


def test_a_hang_of_a_test_without_services_costs_about_a_minute(tmp_path: Path) -> None:
    sections = {each.name: list(each.command) for part in gpu_day.parts(tmp_path, tiny=False).values() for each in part}
    for name, most in (("first", 90), ("test_native", 60), ("test_others", 60)):
        command = sections[name]
        assert float(command[len(command) - command[::-1].index("--timeout")]) < most
        assert command[command.index("--timeout-method") + 1] == "thread", "a signal does not end a wait for a GPU"


def test_a_test_that_failed_has_said_so_when_another_ends_the_run(tmp_path: Path) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text("import os\ndef test_one(): assert 'its' == 'words'\ndef test_two(): os._exit(9)\n")
    options = [
        "-q",
        "-n0",
        "-c",
        os.devnull,
        "--rootdir",
        tmp_path,
        "-p",
        "tests.gpu.conftest",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", *map(str, options), str(tests)]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert made.returncode == 9
    assert "FAILED test_two.py::test_one" in made.stdout
    assert "assert 'its' == 'words'" in made.stdout


def test_tests_that_start_services_are_spread_over_processes(tmp_path: Path) -> None:
    for section in gpu_day.parts(tmp_path, tiny=False)[3]:
        words = list(section.command)
        spread = words[len(words) - words[::-1].index("--dist")]
        assert spread == ("worksteal" if section.name == "test_services" else "loadfile")


def test_the_sanitizer_is_found_where_no_path_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_day, "_TOOLKIT", (str(tmp_path),))
    found = {each.name: each for part in gpu_day.parts(tmp_path, tiny=False).values() for each in part}["sanitizer"]
    assert str(tool) in found.command
    assert not found.hindrance


def test_what_a_call_took_to_begin_is_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk from which nothing was read yet may be slow."""
    given = list[float]()
    monkeypatch.setattr(gpu_day, "run", lambda *asked: given.append(asked[3]) or [])
    for begun in (time.time(), time.time() - 200):
        monkeypatch.setattr("sys.argv", ["", "1", "--folder", str(tmp_path), "--begun", str(begun), "--seconds", "500"])
        with pytest.raises(SystemExit):
            gpu_day.main()
    assert given[0] > 300 >= given[1]


def test_the_script_says_when_it_began(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest "$2" != benchmarks.gpu_day || echo "$*"\n')
    python.chmod(0o755)
    (tmp_path / "tools").mkdir()
    for name in ("gpu_day.sh", "gpu_environment.sh"):
        (tmp_path / "tools" / name).symlink_to(ROOT / "tools" / name)
    (out := tmp_path / "out").mkdir()
    environ = {**os.environ, "PYTHON": str(python), "OUT": str(out)}
    before = int(time.time())
    command = ["sh", str(tmp_path / "tools/gpu_day.sh"), "2", "--tiny"]
    made = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    _, _, *words, begun, part, tiny = made.stdout.split()
    assert words == ["--folder", "build/gpu_day", "--begun"]
    assert before <= int(begun) <= time.time()
    assert (part, tiny) == ("2", "--tiny")
    assert [path.name for path in out.iterdir()] == ["gpu_day.tar.gz"]


def test_each_part_fits_into_its_time(tmp_path: Path) -> None:
    made = gpu_day.parts(tmp_path, tiny=False)
    assert {part: sum(each.seconds for each in sections) for part, sections in made.items()} == {
        1: 640.0,
        2: 530.0,
        3: 430.0,
        4: 520.0,
    }


def test_what_is_sanitized_has_no_pool_of_memory(tmp_path: Path) -> None:
    found = {each.name: each for part in gpu_day.parts(tmp_path, tiny=False).values() for each in part}["sanitizer"]
    assert found.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert "--once" in found.command, "nothing can be captured without one"


def test_make_runs_the_tests_as_a_part_does(tmp_path: Path) -> None:
    """In another environment, whose Python says what it was called with."""
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*"; env\n')
    python.chmod(0o755)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "gpu-check", f"ENVIRONMENT={tmp_path / 'env'}"]
    own = ("MAKEFLAGS", "ARGS")  # of what runs the tests
    environ = {name: value for name, value in os.environ.items() if name not in own} | {"PYTHONPATH": "before"}
    made = subprocess.run(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    called = made.stdout[made.stdout.index("-m pytest -m gpu") :].splitlines()
    assert called[0] == f"-m pytest -m gpu -W default {' '.join(gpu_day.TEST_OPTIONS)} tests/gpu"
    assert f"PYTHONPATH={tmp_path}/build/gpu_day/extra:before" in called
    assert {f"{name}={value}" for name, value in gpu_day.BY_TORCH.items()} <= {*called}


@pytest.mark.parametrize("tiny", [False, True])
def test_sections_have_names_of_their_own_and_test_files_that_are_there(tiny: bool, tmp_path: Path) -> None:
    sections = [each for part in gpu_day.parts(tmp_path, tiny=tiny).values() for each in part]
    assert len({section.name for section in sections}) == len(sections)
    files = {word.partition("::")[0] for section in sections for word in section.command if "tests/gpu/" in word}
    assert files == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}


def test_a_rehearsal_has_more_time_for_each_section(tmp_path: Path) -> None:
    limits = [
        {each.name: each.seconds for part in gpu_day.parts(tmp_path, tiny=tiny).values() for each in part}
        for tiny in (False, True)
    ]
    assert [name for name, seconds in limits[1].items() if seconds < 3 * limits[0][name]] == []


def test_services_that_compute_on_a_gpu_are_the_real_ones() -> None:
    """Light ones take the options of the others, and ask no GPU for anything."""
    started = [
        (path.name, call.lineno, {given.arg: ast.unparse(given.value) for given in call.keywords}.get("light"))
        for path in (ROOT / "tests/gpu").glob("test_*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("encoder_server", "llm_server", "pair")
    ]
    assert started
    assert [each for each in started if each[2] != "False"] == []


def test_where_gpus_are_services_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "cuda_device_count", lambda: 1)
    assert forkserver.forkserver() is None
    assert forkserver.start("llm_service", [], {}, 2) is None


def left(folder: Path) -> str:
    """What those have said that failed."""
    return "\n".join(path.read_text() for path in (folder / "tiny").glob("*.failed"))


def popen(command: Sequence[str], *, env: dict[str, str], **given: Any) -> Any:
    """Has benchmarks forked, on one thread."""
    given["env"] = {**env, "OMP_NUM_THREADS": "1"}
    if command[2].partition(".")[0] != "benchmarks":
        return subprocess.Popen(command, **given)
    return forkserver.popen_benchmark(command, imports=Imports.HF, **given)


@pytest.mark.soak
@pytest.mark.parametrize("part", [1, 2, 4])
def test_a_part_runs_from_end_to_end(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make gpu-rehearsal` runs the third one as well, of which tests are collected, and no more, as by every run of
    this suite."""
    for kernel in (*panel_kernel.TYPED.values(), *quantized_kernel.TYPED.values()):
        kernel.compile()  # the limits of sections are not for that
    monkeypatch.setattr(tables, "popen", popen)
    monkeypatch.setattr("sys.argv", ["", str(part), "--folder", str(tmp_path), "--tiny"])
    with pytest.raises(SystemExit) as ended:
        gpu_day.main()
    assert ended.value.code is None, left(tmp_path)
    wanted = {section.name for section in gpu_day.parts(tmp_path, tiny=True)[part]}
    assert {path.stem for path in (tmp_path / "tiny").glob("*.md")} == wanted
