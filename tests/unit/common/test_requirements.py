"""What is said where the services' packages are not installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.requirements import GATEWAY_MODULES, MODULES, install, require
from tests.launch import ROOT


@pytest.mark.parametrize(("group", "modules"), [("services", MODULES), ("gateway", GATEWAY_MODULES)])
def test_every_package_of_a_group_is_looked_for(group: str, modules: dict[str, str]) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert [spec.partition(">")[0] for spec in groups[group]] == list(modules)
    assert all(find_spec(module) for module in modules.values())


def test_where_all_are_there_nothing_is_said() -> None:
    require("a_service")


def test_what_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "missing-one", "no_such_module")
    monkeypatch.setitem(MODULES, "missing-two", "no_such_package.module")
    with pytest.raises(SystemExit, match=r"^a_service: not installed: missing-one, missing-two\. .*services"):
        require("a_service")


def test_an_extra_is_installed_from_the_checkout_where_there_is_one(tmp_path: Path) -> None:
    assert install("gateway", tmp_path) == "pip install 'twinlens[gateway]'"
    assert install("gateway", ROOT) == f"pip install '{ROOT}' '{ROOT}/wheels/services[gateway]'"
    assert install("services", ROOT) == f"pip install '{ROOT}' '{ROOT}/wheels/services'"


def test_an_older_python_is_named_before_anything_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"^a_service: Python 3\.11 or later is needed$"):
        require("a_service", modules={"missing-one": "no_such_module"})


def test_an_environment_beside_the_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (python := tmp_path / ".venv" / "bin" / "python").parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(SystemExit, match=r", or run it with \.venv/bin/python$"):
        require("a_service", modules={"missing-one": "no_such_module"})
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SystemExit, match=r"wheels/services'$"):
        require("a_service", modules={"missing-one": "no_such_module"})


@pytest.mark.parametrize(
    ("service", "first", "extra"),
    [("encoder_service", "av", ""), ("llm_service", "av", ""), ("gateway", "googleapis-common-protos", "[gateway]")],
)
def test_a_service_says_so_before_it_imports_what_is_missing(service: str, first: str, extra: str) -> None:
    """With no installed package in sight: `-S` leaves site-packages out."""
    started = subprocess.run(
        [sys.executable, "-S", "-m", service], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert started.returncode == 1
    (line,) = started.stderr.splitlines()
    assert line.startswith(f"{service}: not installed: {first}, ")
    assert f"pip install '{ROOT}' '{ROOT}/wheels/services{extra}'" in line
