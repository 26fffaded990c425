from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch import descendants, send
from tests.waiting import until
from tools import up

FAKE = "tests.unit.tools.fake_service"


@contextmanager
def running(*behaviours: str, last: str = "LLM") -> Iterator[subprocess.Popen[str]]:
    """`make up` with two fake services; the second behaves as told. None of them outlives the block."""
    commands = [("encoder", FAKE, []), (last, FAKE, list(behaviours))]
    program = f"from tools import up; up._commands = lambda _: {commands}; raise SystemExit(up.main(['--model', 'x']))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"starting encoder, {last} with x …\n"
            yield process
        finally:
            for pid in descendants(process.pid):
                send(pid, signal.SIGKILL)
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_both_in_order_and_that_is_success(number: signal.Signals) -> None:
    with running() as process:
        assert process.stdout is not None
        assert {process.stdout.readline().split()[0] for _ in range(2)} == {"encoder", "LLM"}
        ask = process.stdout.readline()
        assert ask.startswith("ask with:")
        assert "twinlens ask --llm 127.0.0.1:4321 --image F" in ask, "a port of its own is told"
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert "finishing" in err
    assert process.returncode == 0


def test_the_page_of_a_gateway_is_told() -> None:
    with running(last="gateway") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)][-1] == "drop pictures on: http://127.0.0.1:4321/\n"


def test_a_signal_before_they_serve_stops_them_too() -> None:
    with running("silent") as process:
        until(lambda: len(descendants(process.pid)) == 2, "both are started")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert not out, "nobody can be asked"


def test_a_service_that_ends_by_itself_stops_the_other_and_is_named() -> None:
    with running("short") as process:
        _, err = process.communicate(timeout=120)
    assert "LLM ended by itself" in err
    assert process.returncode == 1


def test_nothing_claims_to_serve_where_the_start_failed() -> None:
    with running("fails") as process:
        out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("", 1)
    assert err == "up: LLM ended by itself; stopping the rest\n"


@pytest.mark.parametrize(
    ("addresses", "started"),
    [({"encoder": "a:1"}, ["encoder", "LLM"]), ({"encoder": "a:1", "LLM": "b:2"}, ["encoder", "LLM", "gateway"])],
)
def test_a_gateway_is_started_when_there_is_what_it_asks(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str], started: list[str]
) -> None:
    """It would say at once that it serves. What has no address here has ended."""
    names: list[str] = []

    def start(name: str, _module: str, _flags: list[str], *, on_change: Callable[[], None]) -> Any:
        names.append(name)
        on_change()
        address = addresses.get(name, "")
        return nullcontext(SimpleNamespace(name=name, address=address, ended=not address))

    monkeypatch.setattr(up, "Service", start)
    monkeypatch.setattr(up, "_commands", lambda _: [(name, FAKE, []) for name in ("encoder", "LLM", "gateway")])
    monkeypatch.setattr(up.signal, "signal", lambda *_: None)
    assert up.main(["--model", "x"]) == 1
    assert names == started


def test_a_second_signal_kills() -> None:
    with running("deaf") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("ask with:") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert "Ctrl-C again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_the_llm_service_is_given_every_encoder_and_the_gateway_is_stopped_first() -> None:
    arguments = argparse.Namespace(model="m", host="127.0.0.1", port=7001, encoders=3, tp=2, http_port=8000)
    *encoders, (_, module, flags), (_, last, flags_of_last) = up._commands(arguments)
    assert (last, flags_of_last) == ("gateway", ["--listen", "127.0.0.1:8000", "--llm", "127.0.0.1:7002"])
    assert up._commands(argparse.Namespace(**{**vars(arguments), "http_port": 0}))[-1][1] == "llm_service"
    addresses = [command[2][command[2].index("--listen") + 1] for command in encoders]
    assert addresses == ["127.0.0.1:7001", "127.0.0.1:7003", "127.0.0.1:7004"]
    assert module == "llm_service"
    assert flags[flags.index("--encoders") + 1] == ",".join(addresses)
    assert flags[flags.index("--listen") + 1] == "127.0.0.1:7002"
    assert flags[-2:] == ["--tp", "2"]


def test_a_port_that_is_taken_is_named_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert up.main(["--model", "x", "--port", str(port), "--http-port", "0"]) == 1
    said = capsys.readouterr()
    assert f"another program listens on 127.0.0.1:{port};" in said.err
    assert "--http-port" in said.err
    assert not said.out


@pytest.mark.parametrize(
    "arguments",
    [["--encoders", "0"], ["--tp", "0"], ["--encoders", "two"], ["--port", "65535"], ["--http-port", "-1"]],
)
def test_counts_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        up.main(arguments)
    assert caught.value.code == 2
