"""How benchmarks start services."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import services


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
