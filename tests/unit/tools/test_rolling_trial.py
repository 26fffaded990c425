"""Which engine the trial of compose.yaml takes, and what it says without one: programs stand in for engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.rolling_trial import __main__ as rolling_trial
from tools.rolling_trial.answers import Answers


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Engines, with their compose, that a trial was begun with. No program is on the PATH."""
    begun: list[tuple[str, list[str]]] = []

    def trial(deployment: rolling_trial.Deployment, upgrade: str) -> int:
        begun.append((deployment.engine, deployment.compose))
        return Answers().failures

    monkeypatch.setattr(rolling_trial, "trial", trial)
    monkeypatch.setenv("PATH", str(tmp_path))
    return begun


def program(folder: Path, name: str, *, fails_at: str = "") -> None:
    """Succeeds at whatever it is asked, but for one command."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" != "{fails_at}" ]\n')
    path.chmod(0o755)


@pytest.mark.parametrize("lacks", ["compose", "info"])
def test_a_docker_without_compose_or_without_its_daemon_is_passed_over(
    tmp_path: Path, taken: list[tuple[str, list[str]]], lacks: str
) -> None:
    program(tmp_path, "docker", fails_at=lacks)
    program(tmp_path, "podman")
    program(tmp_path, "podman-compose")
    assert rolling_trial.main([]) == 0
    assert taken == [("podman", ["podman-compose"])]


def test_docker_comes_first_where_both_work(tmp_path: Path, taken: list[tuple[str, list[str]]]) -> None:
    for name in ("docker", "podman", "podman-compose"):
        program(tmp_path, name)
    assert rolling_trial.main([]) == 0
    assert taken == [("docker", ["docker", "compose"])]


def test_nothing_is_tried_where_no_engine_works(
    tmp_path: Path, taken: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "docker", fails_at="info")
    program(tmp_path, "podman")
    assert rolling_trial.main([]) == 0
    assert not taken
    assert "nothing was tried" in capsys.readouterr().out


def test_an_image_that_is_not_there_is_named(
    tmp_path: Path, taken: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "podman", fails_at="build")
    program(tmp_path, "podman-compose")
    assert rolling_trial.main([]) == 1
    assert not taken
    assert "podman build" in capsys.readouterr().err
