"""The pages' lines for curl, run as they stand but for the address."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gateway.trio import PICTURE, Trio
from tests.launch import ROOT

_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ADDRESS = "127.0.0.1:8000"
COMMANDS = {
    f"{page.name} {number}": command
    for page in (ROOT / "README.md", ROOT / "docs" / "HTTP.md")
    for number, command in enumerate(
        block
        for block in _BLOCK.findall(page.read_text("utf-8"))
        if block.startswith(f"curl http://{_ADDRESS}/v1/chat/")
    )
}


def test_both_pages_have_one() -> None:
    assert {name.partition(" ")[0] for name in COMMANDS} == {"README.md", "HTTP.md"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_page_shows_is_answered(door: Trio, tmp_path: Path, name: str) -> None:
    (tmp_path / "drawing.png").write_bytes(PICTURE)
    command = COMMANDS[name].replace(_ADDRESS, door.gateway.address)
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"], answer
