"""`twinlens batch` against a gateway that answers as a test has scripted it."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from twinlens.cli import batch, main

Answer = tuple[int, dict[str, str], Any]


class Gateway(ThreadingHTTPServer):
    """Answers each request by `script`, of its body and of how often it came."""

    daemon_threads = True
    paths: set[str]

    def __init__(self, script: Callable[[dict[str, Any], int], Answer | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.came: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.paths = set()
        self.closed = threading.Event()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.paths.add(self.path)
            count = sum(each == body for each in self.server.came)
            self.server.came.append(body)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        answer = self.server.script(body, count)
        if answer is None:  # it breaks
            self.close_connection = True
            return
        status, headers, told = answer
        if headers.pop("closes", ""):  # without a word
            self.close_connection = True
        data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), "x-request-id": "r", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def gateway(script: Callable[[dict[str, Any], int], Answer | None]) -> Iterator[Gateway]:
    server = Gateway(script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fine(body: dict[str, Any], _: int) -> Answer:
    return 200, {}, {"said": body["n"], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": {"n": number, **more}}


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return str(path)


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_every_request_is_answered_once_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINLENS_TOKEN", "secret")
    wanted = written(tmp_path / "in", *(line(number) for number in range(40)), "\n")
    with gateway(fine) as server:
        assert main(["batch", wanted, str(tmp_path / "out"), "--gateway", server.url, "--model", "m"]) == 0
    found = answers(tmp_path / "out")
    assert {id: each["response"]["body"]["said"] for id, each in found.items()} == {str(n): n for n in range(40)}
    assert found["7"]["response"]["request_id"] == "r"
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in found.values())
    assert all(body["model"] == "m" for body in server.came)
    assert {each["authorization"] for each in server.headers} == {"Bearer secret"}
    assert "40 of 40 answered, 0 failed; 120 tokens of prompts, 80 generated" in capsys.readouterr().err


def test_what_is_refused_for_now_or_breaks_is_tried_again_and_what_is_refused_for_good_is_not(tmp_path: Path) -> None:
    def script(body: dict[str, Any], count: int) -> Answer | None:
        match body["n"], count:
            case 1, 0 | 1:
                return 503, {"retry-after": "0"}, {"error": "busy"}
            case 2, 0:
                return None
            case 3, _:
                return 400, {}, {"error": {"message": "no"}}
            case 4, _:
                return 429, {"retry-after": "0"}, "not JSON"
        return fine(body, count)

    wanted = written(tmp_path / "in", *(line(number) for number in range(5)))
    with gateway(script) as server:
        given = ["--gateway", server.url, "--attempts", "3", "--concurrency", "2"]
        assert main(["batch", wanted, str(tmp_path / "out"), *given]) == 1
    found = answers(tmp_path / "out")
    assert [found[str(n)]["response"]["status_code"] for n in range(5)] == [200, 200, 200, 400, 429]
    assert found["3"]["response"]["body"] == {"error": {"message": "no"}}
    assert found["4"]["response"]["body"] == "not JSON"
    assert [sum(body["n"] == n for body in server.came) for n in range(5)] == [1, 3, 2, 1, 3]


def test_a_gateway_that_says_whether_a_retry_helps_is_believed(tmp_path: Path) -> None:
    said = {0: (504, "false"), 1: (408, "true"), 2: (429, "FALSE"), 3: (503, "perhaps")}

    def script(body: dict[str, Any], count: int) -> Answer:
        status, retry = said[body["n"]]
        return (status, {"x-should-retry": retry, "retry-after": "0"}, {}) if count < 2 else fine(body, count)

    wanted = written(tmp_path / "in", *map(line, said))
    with gateway(script) as server:
        assert main(["batch", wanted, str(tmp_path / "out"), "--gateway", server.url]) == 1
    found = answers(tmp_path / "out")
    assert [found[str(n)]["response"]["status_code"] for n in said] == [504, 200, 429, 200]
    assert [sum(body["n"] == n for body in server.came) for n in said] == [1, 3, 1, 3]


def test_a_command_that_was_ended_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, out = written(tmp_path / "in", *(line(number) for number in range(4))), tmp_path / "out"
    with gateway(lambda body, count: (500, {}, {}) if body["n"] == 2 else fine(body, count)) as server:
        assert main(["batch", wanted, str(out), "--gateway", server.url]) == 1
    kept = out.read_text().splitlines(keepends=True)
    ended = [each for each in kept if json.loads(each)["custom_id"] != "1"]
    written(out, *ended, '{"id": "batch_req_1", "custom_id": "1", "respo')
    with gateway(fine) as server:
        assert main(["batch", wanted, str(out), "--gateway", server.url]) == 0
    assert sorted(body["n"] for body in server.came) == [1, 2]
    assert "2 of 2 answered (2 more had been before), 0 failed" in capsys.readouterr().err
    assert {id: each["response"]["status_code"] for id, each in answers(out).items()} == dict.fromkeys("0123", 200)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line(1), "{"], "line 2 of the input"),
        ([line(1), line(1)], "line 2 of the input: the custom_id 1 appeared before"),
        ([line(1, stream=True)], "a batch cannot stream answers"),
        ([{**line(1), "custom_id": 5}], "it has no custom_id"),
        ([{**line(1), "method": "GET"}], "its method must be POST"),
        ([{**line(1), "url": "http://elsewhere/"}], "its url a path"),
        ([{**line(1), "url": "/v1/çhat"}], "its url a path"),
        ([{**line(1), "url": "/v1/chat completions"}], "its url a path"),
        ([{**line(1), "body": "x"}], "its body is not an object"),
        (["[" * 100_000], "line 1 of the input"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused_before_anything_is(
    lines: list[Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gateway(fine) as server:
        given = [written(tmp_path / "in", *lines), str(tmp_path / "out"), "--gateway", server.url]
        assert main(["batch", *given]) == 2
    assert server.came == []
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (picture := tmp_path / "in").write_bytes(b"\x89PNG\r\n")
    assert main(["batch", str(picture), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "twinlens: line 1 of the input: it is not text in UTF-8\n"


@pytest.mark.parametrize(
    "there",
    [
        "what somebody wrote\n",
        "without an end",
        '{"custom_id": "1", "response": "fine"}\n',
        '{"custom_id": ["1"], "response": {"status_code": 200}}\n',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_output_of_a_batch_is_left_as_it_is(there: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text(there)
    with gateway(fine) as server:
        assert main(["batch", written(tmp_path / "in", line(1)), str(out), "--gateway", server.url]) == 2
    assert out.read_text() == there


def test_answers_to_other_requests_stay(tmp_path: Path) -> None:
    first, second = written(tmp_path / "1", line(1)), written(tmp_path / "2", line(2))
    with gateway(fine) as server:
        for wanted in (first, second, first):
            assert main(["batch", wanted, str(tmp_path / "out"), "--gateway", server.url]) == 0
    assert [body["n"] for body in server.came] == [1, 2]
    assert answers(tmp_path / "out").keys() == {"1", "2"}


def test_what_is_answered_is_there_until_what_failed_is_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    given = ["batch", written(tmp_path / "in", line(1), line(2)), str(out)]
    with gateway(lambda body, count: (500, {}, {}) if body["n"] == 2 else fine(body, count)) as server:
        assert main([*given, "--gateway", server.url]) == 1
        before = out.read_text()
        out.chmod(0o640)
        with monkeypatch.context() as patched:
            patched.setattr("shutil.copymode", Mock(side_effect=OSError("no space is left")))
            assert main([*given, "--gateway", server.url]) == 2
    assert out.read_text() == before
    assert {each.name for each in tmp_path.iterdir()} == {"in", "out"}
    with gateway(fine) as server:
        assert main([*given, "--gateway", server.url]) == 0
    assert server.came == [{"n": 2}]
    assert answers(out).keys() == {"1", "2"}
    assert out.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("there", [None, 1, 2], ids=["nothing there", "an answer there", "a failed one there"])
def test_two_commands_do_not_write_one_output(there: int | None, ended_by: signal.Signals, tmp_path: Path) -> None:
    """An output with a failed answer is replaced by another file, to which the first command's lock goes over."""
    asked, ended = threading.Event(), threading.Event()

    def script(body: dict[str, Any], count: int) -> Answer | None:
        if body["n"] == 3 and not count:
            asked.set()
            assert ended.wait(60)
            return None
        return fine(body, count)

    out, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(out)
    if there is not None:
        earlier = written(tmp_path / "earlier", *(line(number) for number in range(1, there + 1)))
        with gateway(lambda body, count: (400, {}, {}) if body["n"] == 2 else fine(body, count)) as server:
            assert main(["batch", earlier, str(out), "--gateway", server.url]) == (there == 2)
    wanted = written(tmp_path / "in", *(line(number) for number in (2, 3)))
    command = [sys.executable, "-m", "twinlens", "batch", wanted]
    with gateway(script) as server, subprocess.Popen([*command, str(out), "--gateway", server.url]) as first:
        try:
            assert asked.wait(60)
            second = [*command, str(link), "--gateway", server.url]
            refused = subprocess.run(second, capture_output=True, text=True, check=False)
            assert refused.returncode == 4
            assert refused.stderr == f"twinlens: another command writes {link}, which has to end first\n"
            assert sum(body["n"] == 3 for body in server.came) == 1
        finally:
            first.send_signal(ended_by)
            first.wait()
            ended.set()
        assert subprocess.run([*command, str(out), "--gateway", server.url], check=False).returncode == 0
    assert answers(out).keys() == {"2", "3"} | ({"1"} if there else set())


def test_an_output_that_was_replaced_while_it_was_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a command would have the lock of a file that is nobody's any more."""
    wanted, out = written(tmp_path / "in", line(1), line(2)), tmp_path / "out"
    with gateway(lambda body, count: (400, {}, {}) if body["n"] == 2 else fine(body, count)) as server:
        assert main(["batch", wanted, str(out), "--gateway", server.url]) == 1
    lock, came = fcntl.flock, list[Any]()

    def replaced_first(file: Any, operation: int) -> None:
        came.append(file)
        if len(came) == 1:
            (tmp_path / "other").write_text(out.read_text())
            (tmp_path / "other").replace(out)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    with gateway(fine) as server:
        assert main(["batch", wanted, str(out), "--gateway", server.url]) == 0
    assert len(came) == 3  # twice as it is opened, and then what replaces it
    assert came[0].closed
    assert answers(out).keys() == {"1", "2"}


def test_where_a_file_system_knows_no_locks_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, out = written(tmp_path / "in", line(1), line(2)), tmp_path / "out"
    refused = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=refused))
    with gateway(lambda body, count: (400, {}, {}) if body["n"] == 2 and not count else fine(body, count)) as server:
        for expected in (1, 0):
            assert main(["batch", wanted, str(out), "--gateway", server.url]) == expected
            told = capsys.readouterr().err.splitlines()[0]
            assert (
                told
                == f"twinlens: {out} cannot be locked ({refused.strerror}): no other command may write it meanwhile"
            )
    assert answers(out).keys() == {"1", "2"}


def test_a_connection_that_the_gateway_has_closed_meanwhile_is_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(body: dict[str, Any], count: int) -> Answer:
        return fine(body, count) if count else (503, {"closes": "yes"}, {})

    with gateway(script) as server:
        monkeypatch.setattr(batch._Batch, "_pause", lambda *_: 0.0 if server.closed.wait(30) else 1e6)
        given = [written(tmp_path / "in", line(1)), str(tmp_path / "out"), "--gateway", server.url, "--attempts", "2"]
        assert main(["batch", *given]) == 0
    assert len(server.came) == 2


def test_requests_may_come_from_another_program_and_answers_go_to_one(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(line(1)) + "\r\n",))
    writer.start()
    with gateway(fine) as server:
        assert main(["batch", str(pipe), "-", "--gateway", server.url]) == 0
        assert main(["batch", written(tmp_path / "in", line(1)), os.devnull, "--gateway", server.url]) == 0
    writer.join()
    (told,) = capsysbinary.readouterr().out.splitlines()
    assert json.loads(told)["custom_id"] == "1"


@pytest.mark.parametrize("usage", ["many", [1], {"prompt_tokens": "three"}])
def test_an_answer_may_count_its_tokens_as_it_likes(usage: Any, tmp_path: Path) -> None:
    wanted = written(tmp_path / "in", line(1))
    with gateway(lambda *_: (200, {}, {"usage": usage})) as server:
        assert main(["batch", wanted, str(tmp_path / "out"), "--gateway", server.url]) == 0


def test_a_page_that_is_deeper_than_json_may_be_is_text(tmp_path: Path) -> None:
    deep = "[" * 100_000
    with gateway(lambda *_: (200, {}, deep)) as server:
        given = [written(tmp_path / "in", line(1)), str(tmp_path / "out"), "--gateway", server.url]
        assert main(["batch", *given]) == 0
    assert answers(tmp_path / "out")["1"]["response"]["body"] == deep


def test_a_gateway_that_has_refused_something_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = written(tmp_path / "in", line(1), line(2))
    with gateway(lambda body, _: None if body["n"] == 1 else (400, {}, {})) as server:
        assert main(["batch", wanted, str(tmp_path / "out"), "--gateway", server.url, "--attempts", "1"]) == 1
    assert "no gateway" not in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://me:secret@h", "http://h/?key=1", "http://h/#a", "http://h/a b", "ftp://h"])
def test_an_address_with_something_that_would_not_be_sent_is_refused(url: str, tmp_path: Path) -> None:
    assert main(["batch", written(tmp_path / "in", line(1)), str(tmp_path / "out"), "--gateway", url]) == 2


def test_a_time_that_no_clock_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["batch", written(tmp_path / "in", line(1)), str(tmp_path / "out"), "--timeout", "inf"])


@pytest.mark.parametrize(("behind", "path"), [("", ""), ("/v1", ""), ("/here/", "/here"), ("/here/v1/", "/here")])
def test_a_gateway_is_named_as_for_clients_of_openai_or_without_the_version(
    behind: str, path: str, tmp_path: Path
) -> None:
    with gateway(fine) as server:
        given = [written(tmp_path / "in", line(1)), str(tmp_path / "out"), "--gateway", f"{server.url}{behind}"]
        assert main(["batch", *given]) == 0
    assert server.paths == {f"{path}/v1/chat/completions"}


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_a_gateway_with_a_numbered_address_and_no_port_is_at_that_of_its_scheme(scheme: str, port: int) -> None:
    given = argparse.Namespace(gateway=f"{scheme}://[2001:db8::5]/v1", token_file=None, ca_file=None)
    connection = batch._Gateway.of(given).connect(1.0)
    assert (connection.host, connection.port) == ("2001:db8::5", port)


def test_where_no_gateway_answers_it_says_so_at_once_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch._Batch, "_pause", staticmethod(lambda *_: 0.0))
    with gateway(fine) as server:
        nowhere = server.url
    given = ["--gateway", nowhere, "--attempts", "3"]
    assert main(["batch", written(tmp_path / "in", line(1)), str(tmp_path / "out"), *given]) == 3
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == f"twinlens: {nowhere} does not answer ([Errno 111] Connection refused); trying again"
    assert last.startswith(f"twinlens: no gateway answers at {nowhere}")
    assert answers(tmp_path / "out")["1"]["error"]["code"] == "unreachable"


def test_a_token_goes_over_http_to_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINLENS_TOKEN", "secret")
    given = [written(tmp_path / "in", line(1)), str(tmp_path / "out"), "--gateway", "http://gateway.invalid"]
    assert main(["batch", *given]) == 2
    assert "--plaintext-token" in capsys.readouterr().err
    assert main(["batch", *given, "--plaintext-token", "--attempts", "1"]) == 3
