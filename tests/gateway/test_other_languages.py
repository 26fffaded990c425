"""The examples in TypeScript and Go, as `make examples` builds them: both doors give what Python gets."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gateway.trio import PICTURE, Trio
from tests.launch import ROOT
from twinlens import SamplingParams, image

TYPESCRIPT = ROOT / "examples/typescript"
GO = ROOT / "build/examples/ask"
QUESTION = "What is it?"


def typescript(*flags: str) -> list[str]:
    if shutil.which("npm") is None or not (TYPESCRIPT / "gen").is_dir():
        pytest.skip("the example is not installed: make examples")
    return ["npm", "run", "--silent", "--prefix", str(TYPESCRIPT), "ask", "--", *flags]


def go(*flags: str) -> list[str]:
    if not GO.exists():
        pytest.skip("the example is not built: make examples")
    return [str(GO), *(flag.replace("--", "-", 1).replace("llm=http://", "llm=") for flag in flags)]


@pytest.mark.parametrize("language", [typescript, go])
@pytest.mark.parametrize("through", ["llm", "gateway"])
def test_an_answer_about_a_picture_is_streamed(door: Trio, tmp_path: Path, language, through: str) -> None:
    (tmp_path / "picture.png").write_bytes(PICTURE)
    address = {"llm": door.services.llm, "gateway": door.gateway}[through].address
    done = subprocess.run(
        [*language(f"--{through}=http://{address}"), str(tmp_path / "picture.png"), QUESTION],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = door.services.text.ask(QUESTION, image(PICTURE), sampling=SamplingParams(temperature=0, max_tokens=256))
    assert done.stdout == expected.text + "\n"
