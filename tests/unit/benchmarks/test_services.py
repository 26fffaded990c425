"""How benchmarks start services."""

from __future__ import annotations

import io
import json
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import services
from common.hardware import NOT_LOCKED


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Those that processes are started with, none of which runs."""
    given: list[dict[str, str]] = []

    def start(_: object, *, env: dict[str, str], **__: object) -> Any:
        given.append(env)
        out = io.StringIO("ready grpc=127.0.0.1:1\n")
        return SimpleNamespace(stdout=out, pid=1, send_signal=lambda _: None, wait=lambda _: 0)

    monkeypatch.setattr(services, "popen", start)
    for service in ("LLM", "ENCODER"):
        monkeypatch.delenv(f"TWINLENS_{service}_KERNELS", raising=False)
    return given


def test_both_services_are_ready_when_their_kernels_are(environments: list[dict[str, str]]) -> None:
    with services.both(Path("m")):
        pass
    encoder, llm = environments
    assert (encoder["TWINLENS_ENCODER_KERNELS"], llm["TWINLENS_LLM_KERNELS"]) == ("wait", "wait")


def test_whoever_measures_has_the_last_word(
    environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINLENS_ENCODER_KERNELS", "torch")
    with services.process("encoder_service"):
        pass
    assert environments[0]["TWINLENS_ENCODER_KERNELS"] == "torch"


@pytest.mark.parametrize(("config", "told"), [("    kernels: str = option(\n", True), ("    attention: str\n", False)])
def test_an_older_encoder_is_told_nothing_that_it_would_refuse(
    environments: list[dict[str, str]], tmp_path: Path, config: str, told: bool
) -> None:
    (tmp_path / "encoder_service").mkdir()
    (tmp_path / "encoder_service" / "config.py").write_text(config)
    with services.process("encoder_service", checkout=tmp_path):
        pass
    assert ("TWINLENS_ENCODER_KERNELS" in environments[0]) == told


@pytest.mark.parametrize("cause", [NOT_LOCKED, "something else"])
def test_figures_of_rows_that_are_in_ordinary_memory_are_marked(
    cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is a GPU: what a service says of it comes from a process of its own."""
    said = json.dumps({"event": cause, "level": "warning"})
    code = f"import sys; print({said!r}, file=sys.stderr, flush=True); print('ready grpc=here', flush=True)"
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str], **given: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([command[0], "-c", code], **given))
        return started[-1]

    threads: list[threading.Thread] = []
    monkeypatch.setattr(services, "popen", start)
    monkeypatch.setattr(services, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(services.threading, "Thread", lambda **given: threads.append(thread_of(**given)) or threads[0])
    with services.process("llm_service") as address:
        assert address == "here"
        threads[0].join()
    assert started[0].stdout is not None
    started[0].stdout.close()
    told = capsys.readouterr()
    assert said in told.err
    assert told.out.count(NOT_LOCKED) == (cause == NOT_LOCKED)


thread_of = threading.Thread
