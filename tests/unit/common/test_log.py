"""What a line of the log looks like to programs, and to people at a terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
import structlog

from common.telemetry import log
from common.telemetry.log_sink import Sink


class Screen(io.StringIO):
    """A standard error that is, or is not, a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool, str], str]]:
    """What is on the screen after a failure was logged there at a given level."""
    before = structlog.get_config()

    def write(terminal: bool, level: str) -> str:
        screen = Screen(terminal=terminal)
        monkeypatch.setattr("sys.stderr", screen)
        log.configure(level, service="encoder")
        with log.bound(request_id="r1"):
            try:
                raise ValueError("no such picture")
            except ValueError:
                log.get("media").exception("a picture was refused", size=3)
            log.get("media").debug("small talk")
        return screen.getvalue()

    yield write
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)


def say_twice() -> None:
    log.configure("info", service="encoder")
    log.get("server").info("draining")
    log.get("server").info("drained")


def test_programs_get_an_object_a_line_with_the_requests_id(written: Callable[[bool, str], str]) -> None:
    (line,) = written(False, "info").splitlines()
    entry = json.loads(line)
    told = {name: entry[name] for name in ("service", "component", "event", "level", "request_id", "size")}
    assert told == {
        "service": "encoder",
        "component": "media",
        "event": "a picture was refused",
        "level": "error",
        "request_id": "r1",
        "size": 3,
    }
    assert "ValueError: no such picture" in entry["exception"]
    assert entry["timestamp"].endswith("Z")


def test_a_line_of_a_thread_says_of_which_service_it_is(
    written: Callable[[bool, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of gRPC's own, in which replaced certificates are read."""
    screen = Screen(terminal=False)
    monkeypatch.setattr("sys.stderr", screen)
    log.configure("info", service="encoder")
    thread = Thread(target=log.get("tls").info, args=("certificates were replaced",))
    thread.start()
    thread.join()
    assert json.loads(screen.getvalue())["service"] == "encoder"


def test_people_get_lines_that_can_be_read(written: Callable[[bool, str], str]) -> None:
    text = written(True, "debug")
    assert "a picture was refused" in text
    assert "no such picture" in text
    assert "small talk" in text
    assert not text.startswith("{")


def test_a_reader_of_the_log_that_has_left_fails_nobody(
    written: Callable[[bool, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tee` does at the Ctrl-C that drains a service: its requests must not end by a line of the log."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr("sys.stderr", broken)
        say_twice()


def test_a_full_disk_loses_lines_and_fails_nobody(
    written: Callable[[bool, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = False
    with suppress(OSError), Path("/dev/full").open("w") as full:  # which is written to when it is closed, too
        monkeypatch.setattr("sys.stderr", full)
        say_twice()
        said = True
    assert said


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_who_does_not_read_the_log_holds_nobody_up_and_is_told_what_is_missing(
    written: Callable[[bool, str], str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a collector that hangs. Lines come whole, a long one among them that there is no room for at once."""
    reader, writer = os.pipe() if kind == "pipe" else (each.detach() for each in socket.socketpair())
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as lines:
        monkeypatch.setattr("sys.stderr", stream)
        log.configure("info", service="encoder")
        found = b""
        for turn in range(4):
            for number in range(600):
                log.get("server").info("said", number=number, turn=turn, text="x" * (100_000 if number == 7 else 500))
            while piece := lines.read(1 << 20):
                found += piece
        assert os.get_blocking(writer), "others write there as before"
    *whole, _ = found.split(b"\n")
    entries = list(map(json.loads, whole))
    assert len(entries) < 4 * 600
    missing = sum(entry.get("lines_lost", 0) for entry in entries)
    after = [(entry["turn"], entry["number"]) for entry in entries]
    assert after == sorted(after)
    turn, number = after[-1]
    assert len(entries) + missing == 600 * turn + number + 1


def test_a_line_that_is_longer_than_there_is_room_for_is_whole_before_another_process_s() -> None:
    reader, writer = os.pipe()
    long = "x" * 300_000
    with os.fdopen(reader, "rb") as lines, os.fdopen(writer, "w") as stream, ThreadPoolExecutor(1) as pool:
        found = pool.submit(lines.readline)
        sink = Sink(stream)
        sink.write(f"{long}\n")
        os.write(writer, b"another's\n")
        assert found.result(180) == f"{long}\n".encode()
        assert lines.readline() == b"another's\n"


def test_a_process_that_ends_has_said_its_last_line_if_somebody_reads() -> None:
    say = "from common.telemetry import log; log.configure('info', service='llm'); log.get('e').error('x' * 200_000)"
    with subprocess.Popen([sys.executable, "-c", say], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        first = process.stderr.read(60_000)
        entry = json.loads(first + process.stderr.read())
    assert entry["event"] == 200_000 * "x"
    assert process.returncode == 0


def test_a_thread_whose_line_is_stuck_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, go = Event(), Event()

    def write(_: int, data: bytes) -> int:
        stuck.set()
        assert go.wait(180)
        return len(data)

    before = structlog.get_config()
    monkeypatch.setattr(os, "write", write)
    with Path(os.devnull).open("w") as stream, ThreadPoolExecutor(1) as pool:
        log.write_to(stream)
        first = pool.submit(log.get("server").info, "said")
        assert stuck.wait(180)
        log.get("server").info("lost")
        go.set()
        first.result(180)
    structlog.configure(**before)


def test_threads_that_log_at_once_write_whole_lines() -> None:
    def say(sink: Sink, thread: int) -> None:
        for number in range(200):
            sink.write(f"{thread} {number} {'x' * 20_000}\n")

    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as lines, ThreadPoolExecutor(5) as pool:
        found = pool.submit(lines.read)
        with os.fdopen(writer, "w") as stream:
            sink = Sink(stream)
            list(pool.map(partial(say, sink), range(4)))
            del sink  # which has a descriptor of its own
        *whole, _ = found.result(180).split(b"\n")
    entries = [line.split() for line in whole]
    assert {len(entry) for entry in entries} == {3}
    assert {entry[2] for entry in entries} == {b"x" * 20_000}
    for thread in (b"0", b"1", b"2", b"3"):
        numbers = [int(number) for who, number, _ in entries if who == thread]
        assert numbers == sorted(set(numbers))


def test_lines_that_a_full_disk_has_no_room_for_are_counted_once(
    written: Callable[[bool, str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    room = True

    def write(descriptor: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_anyhow(descriptor, data)

    write_anyhow = os.write
    monkeypatch.setattr(os, "write", write)
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        say_twice()
        room = False
        say_twice()
        room = True
        log.get("server").info("drained")
        log.get("server").info("drained")
        entries = list(map(json.loads, (tmp_path / "log").read_text().splitlines()))
    assert [entry.get("lines_lost", 0) for entry in entries] == [0, 0, 2, 0]
    assert [entry["event"] for entry in entries] == ["draining", "drained", "drained", "drained"]


def test_a_closed_standard_error_is_no_place_for_a_log(
    written: Callable[[bool, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    say_twice()


def test_a_log_that_programs_read_costs_a_process_no_library_for_terminals() -> None:
    show = "import sys, common.telemetry.log; print({'rich', 'pygments'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=180, check=True)
    assert shown.stdout == "set()\n"
