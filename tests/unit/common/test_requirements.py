"""What is said where the services' packages are not installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from common.requirements import MODULES, require
from tests.launch import ROOT


def test_every_package_of_the_services_is_looked_for() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert [spec.partition(">")[0] for spec in groups["services"]] == list(MODULES)
    assert all(find_spec(module) for module in MODULES.values())


def test_where_all_are_there_nothing_is_said() -> None:
    require("a_service")


def test_what_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "missing-one", "no_such_module")
    monkeypatch.setitem(MODULES, "missing-two", "no_such_package.module")
    with pytest.raises(SystemExit, match=r"^a_service: not installed: missing-one, missing-two\. .*services"):
        require("a_service")


@pytest.mark.parametrize("service", ["encoder_service", "llm_service"])
def test_a_service_says_so_before_it_imports_what_is_missing(service: str) -> None:
    """With no installed package in sight: `-S` leaves site-packages out."""
    started = subprocess.run(
        [sys.executable, "-S", "-m", service], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert started.returncode == 1
    (line,) = started.stderr.splitlines()
    assert line.startswith(f"{service}: not installed: av, ")
    assert line.endswith("pip install 'twinlens[services]'")
