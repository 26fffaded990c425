"""Services that are started without a standard stream, or with one that cannot be written to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.waiting import until

_PROGRAM = """
import os, socket, subprocess, sys
from common.process.descriptors import prepare

prepare("a program")
os.fstat(2)
assert socket.socket().fileno() > 2
sys.exit(subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in range(3)]"]).returncode)
"""
_MODEL = ("--model", "models/demo", "--listen", "127.0.0.1:0")
_SERVICES = {
    "encoder": ("testkit.light.encoder", *_MODEL, "--decode-processes", "1"),
    "llm": ("testkit.light.llm", *_MODEL),
    "gateway": ("gateway", "--listen", "127.0.0.1:0", "--llm", "127.0.0.1:1"),
}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_leads_nowhere_and_so_it_does_in_children(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", _PROGRAM]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_as_many_are_allowed_as_may_be() -> None:
    said = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    program = f"from common.process.descriptors import prepare; prepare('a program'); {said}"

    def limits(few: str) -> list[str]:
        command = ["sh", "-c", f'ulimit {few}; exec "$0" "$@"', sys.executable, "-c", program]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

    assert limits("-n 400; ulimit -Sn 100") == ["400", "400"]
    assert limits("-n 400") == ["400", "400"]


@pytest.mark.parametrize("service", _SERVICES)
@pytest.mark.parametrize("limit", [8, 16, 20, 60])
def test_a_service_that_may_open_too_few_ends_with_one_line(service: str, limit: int) -> None:
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"', sys.executable, "-m", *_SERVICES[service]]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
    assert "file descriptors may be opened" in ended.stderr
    assert f"the limit of {limit}" in ended.stderr


@pytest.mark.parametrize("service", _SERVICES)
@pytest.mark.parametrize("streams", ["<&- >&-", ">/dev/full"])
def test_a_service_serves_and_ends_in_order_without_a_standard_output(
    service: str, streams: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", f'exec "$0" "$@" {streams}', sys.executable, "-m", *_SERVICES[service]]

    def ready() -> list[dict[str, str]]:
        assert process.poll() is None, log.read_text()
        lines = (json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n"))
        return [line for line in lines if line["event"] == "ready"]

    with log.open("w") as errors, subprocess.Popen(command, cwd=ROOT, stderr=errors) as process:
        try:
            until(ready, "it serves")
            (said,) = ready()
            assert said.get("standard_output") == ("No space left on device" if "full" in streams else None)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0, log.read_text()
        finally:
            process.kill()
