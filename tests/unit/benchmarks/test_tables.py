"""Tables are taken one by one, each within its time, and a run that was ended goes on where it stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import machine, tables, vllm_environment, vllm_side
from benchmarks.sides import TITLES
from benchmarks.tables import Table, all_tables, take, tiny_tables
from tests.launch import ROOT
from tests.waiting import until


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy", lambda: 0.01)


def says(program: str, seconds: float = 60.0, **given: object) -> Table:
    return Table("made", ("-c", program), seconds, **given)  # type: ignore[arg-type]


def test_a_table_lies_below_what_it_was_taken_on(tmp_path: Path) -> None:
    said = take(says("print('| a | b |')"), tmp_path, ["processor: one"])
    assert re.fullmatch(r"\d+ s, quiet", said)
    lines = (tmp_path / "made.md").read_text().splitlines()
    assert lines[:3] == ["# made", "", "- processor: one"]
    assert "- others before: 1% of the cores, quiet" in lines
    assert "- command: python -c 'print('\"'\"'| a | b |'\"'\"')'" in lines
    assert lines[-1] == "| a | b |"


def test_a_table_that_is_there_is_not_taken_again(tmp_path: Path) -> None:
    (tmp_path / "made.md").write_text("as it was")
    assert take(says("raise SystemExit(1)"), tmp_path, []) == "is there"
    assert (tmp_path / "made.md").read_text() == "as it was"


def test_one_that_fails_leaves_its_words_and_is_tried_again(tmp_path: Path) -> None:
    assert "FAILED: exit code 3" in take(says("print('half'); raise SystemExit(3)"), tmp_path, [])
    assert "half" in (tmp_path / "made.failed").read_text()
    assert not (tmp_path / "made.md").exists()
    assert "FAILED" not in take(says("print('whole')"), tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["made.md"]


def test_one_that_takes_too_long_is_interrupted_and_its_processes_end(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "try:\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt: print('unwound', flush=True)\n"
    )
    said, seconds = list[str](), 2.0
    while not said or not said[-2].isdecimal():  # where it had not begun in its time, it gets more
        assert "FAILED: out of time" in take(says(program, seconds=seconds), tmp_path, [])
        said, seconds = (tmp_path / "made.failed").read_text().splitlines(), 4 * seconds
    *_, child, last = said
    assert last == "unwound"
    until(lambda: not Path(f"/proc/{child}").exists(), "the child of a table that was ended has ended")


def test_one_that_stays_though_it_was_killed_keeps_no_other_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process stays that waits for a driver which does not answer any more."""
    waited = list[float]()

    def wait(seconds: float) -> int:
        waited.append(seconds)
        raise subprocess.TimeoutExpired("made", seconds)

    stuck = SimpleNamespace(wait=wait, poll=lambda: None, send_signal=lambda _: None, pid=1)
    monkeypatch.setattr(tables, "popen", lambda *_, **__: stuck)
    monkeypatch.setattr("os.killpg", lambda *_: None)
    assert take(says("", seconds=9.0), tmp_path, []).endswith("FAILED: out of time")
    assert waited[0] == 9.0
    assert sum(waited[1:]) < 70


def test_variables_that_would_change_figures_are_a_tables_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TWINLENS_LLM_THREADS", "7")
    monkeypatch.setenv("HOME_OF_ALL", "kept")
    program = "import os; print([name for name in os.environ if name[:4] in ('OMP_', 'TWIN', 'HOME')])"
    take(says(program, environ={"OMP_WAIT_POLICY": "PASSIVE"}), tmp_path, [])
    last = (tmp_path / "made.md").read_text().splitlines()[-1]
    assert "HOME_OF_ALL" in last
    assert "OMP_WAIT_POLICY" in last
    assert "OMP_NUM_THREADS" not in last
    assert "TWINLENS" not in last


def test_a_machine_that_is_not_quiet_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy", lambda: 0.6)
    assert take(says(""), tmp_path, []).endswith(" s, NOT QUIET")
    assert "- others before: 60% of the cores, NOT QUIET" in (tmp_path / "made.md").read_text()


def test_what_cannot_be_measured_here_is_left_out_by_name(tmp_path: Path) -> None:
    assert take(says("", hindrance="no such vectors"), tmp_path, []) == "left out: no such vectors"
    assert list(tmp_path.iterdir()) == []


def test_every_table_is_a_benchmark_of_this_repository_and_is_listed_once() -> None:
    listed = all_tables(Path("vllm"))
    assert len({table.name for table in listed}) == len(listed)
    for table in listed:
        module = table.command[1].removeprefix("benchmarks").removeprefix(".") or "__main__"
        assert (ROOT / "benchmarks" / f"{module}.py").is_file()
    assert [table.name for table in tiny_tables(None)] == [table.name for table in listed]


def test_a_command_is_shown_as_one_types_it() -> None:
    shown = {table.name: str(table) for table in all_tables(Path("a folder/vllm"))}
    assert shown["overlap"] == "TWINLENS_LLM_THREADS=1 python -m benchmarks.overlap models/demo --runs 3"
    assert shown["peers"].endswith("--vllm 'a folder/vllm'")


def test_a_run_of_all_says_which_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "all_tables", lambda vllm: [says("raise SystemExit(1)"), Table("good", ("-c", ""), 60)])
    monkeypatch.setattr(tables, "tiny_tables", tables.all_tables)
    monkeypatch.setattr(sys, "argv", ["tables", str(tmp_path), "--tiny"])
    with pytest.raises(SystemExit, match="failed: made"):
        tables.main()
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == ["good.md", "made.failed"]


def test_the_machine_is_told() -> None:
    assert "cores" in machine.processor()
    assert "torch" in machine.software()


def test_a_peer_that_is_not_there_says_why(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    with pytest.raises(vllm_side.NotServingError, match="was named"):
        vllm_side.version(None)
    with pytest.raises(vllm_side.NotServingError, match="No such file"):
        vllm_side.version(program)
    program.write_text("#!/bin/sh\necho oh >&2\necho no AVX-512 >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(vllm_side.NotServingError, match="fails: no AVX-512"):
        vllm_side.version(program)
    program.write_text("#!/bin/sh\necho a warning\necho 0.1\n")
    assert vllm_side.version(program) == "0.1"


@pytest.mark.soak
def test_a_peer_is_measured_through_its_server(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("vllm_stand_in.py")} "$@"\n')
    program.chmod(0o755)
    command = ["--only", "vllm", "--vllm", str(program), "--model", "models/demo", "--runs", "1", "--tokens", "3"]
    whole = [sys.executable, "-m", "benchmarks", *command]
    said = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("vLLM 0.1\n")
    assert said.stdout.count("| nothing |") == len(TITLES)


def test_a_peers_packages_are_completed(tmp_path: Path) -> None:
    vllm_environment.complete(tmp_path)
    program = "import sys; from importlib.metadata import version; print(version('vllm'), sys.meta_path[0].__name__)"
    said = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert said.stdout.split() == [f"{vllm_environment.VERSION}+cpu", "Declare"]
