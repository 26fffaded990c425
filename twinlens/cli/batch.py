"""`twinlens batch`: sends a file of requests, in the format of OpenAI's batches, to a gateway, many at a time. An
interrupted command can be repeated: requests already answered in the output are not sent again."""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import random
import selectors
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from twinlens._version import __version__
from twinlens.cli.connection import bounded, token_of

_LATER = (429, 502, 503, 504)
"""Statuses after which another attempt may succeed, unless the response says otherwise."""
_LONGEST_PAUSE = 30.0
_NOT_REACHABLE, _TAKEN = 3, 4
_HERE = ("127.0.0.1", "::1", "localhost")
_BEGINS = b'{"id": "batch_req_'
"""Every line of an output begins so."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("batch", help="answer a file of requests", description=__doc__)
    parser.set_defaults(run=run, address="")
    parser.add_argument("input", metavar="IN", help="a request a line, with custom_id, method, url and body; -: stdin")
    parser.add_argument(
        "output", metavar="OUT", help="an answer a line, as they come; existing lines are kept; -: stdout"
    )
    parser.add_argument("--gateway", metavar="URL", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", metavar="NAME", help="for requests without one")
    at_once = bounded(int, 1, 1024)
    parser.add_argument("--concurrency", type=at_once, metavar="N", default=32, help="at a time (default: %(default)d)")
    tries = bounded(int, 1, 100)
    parser.add_argument("--attempts", type=tries, metavar="N", default=8, help="of each one (default: %(default)d)")
    seconds = bounded(float, 0.001, 1e6)
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=600.0, help="of each attempt (default: %(default)g)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token (or set TWINLENS_TOKEN)")
    parser.add_argument("--plaintext-token", action="store_true", help="send it over http, on a network that you trust")
    parser.add_argument("--ca-file", metavar="PEM", help="for an https gateway, trusting only these roots")


def run(arguments: argparse.Namespace) -> int:
    """Sends the requests. Returns 0 if all are answered."""
    gateway = _Gateway.of(arguments)
    with _seekable(arguments.input) as requests:
        ids = {job.id for job in _jobs(requests)}
        if (opened := _open_output(arguments.output, ids)) is None:
            print(f"twinlens: another command writes {arguments.output}, which has to end first", file=sys.stderr)
            return _TAKEN
        answered, writable = opened
        requests.seek(0)
        left = (job for job in _jobs(requests) if job.id not in answered)
        with writable as output:
            batch = _Batch(gateway, left, output, arguments, len(ids) - len(answered), len(answered))
            batch.run()
    print(batch.told(), file=sys.stderr)
    if batch.unreachable and not batch.heard:
        print(f"twinlens: no gateway answers at {arguments.gateway}: {batch.unreachable}", file=sys.stderr)
        return _NOT_REACHABLE
    return int(batch.failed > 0)


@dataclass(frozen=True, slots=True)
class _Job:
    """One request: its `id`, its path, and its body."""

    id: str
    path: str
    body: dict[str, Any]


def _jobs(lines: BinaryIO) -> Iterator[_Job]:
    """The requests of a file. Raises ValueError, with the line number, for an invalid one."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            job = _job(json.loads(line))
        except UnicodeDecodeError:
            raise ValueError(f"line {number} of the input: it is not text in UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of the input: {error}") from error
        if job.id in seen:
            raise ValueError(f"line {number} of the input: the custom_id {job.id} appeared before")
        seen.add(job.id)
        yield job


def _job(told: Any) -> _Job:
    if not isinstance(told, dict) or not isinstance(told.get("custom_id"), str) or not told["custom_id"]:
        raise ValueError("it has no custom_id")
    if told.get("method", "POST") != "POST" or not _is_path(told.get("url")):
        raise ValueError("its method must be POST, and its url a path such as /v1/chat/completions")
    body = told.get("body")
    if type(body) is not dict:
        raise ValueError("its body is not an object")
    if body.get("stream"):
        raise ValueError("a batch cannot stream answers")
    return _Job(told["custom_id"], told["url"], body)


def _is_path(url: Any) -> bool:
    """Whether that can stand in a request's first line."""
    return isinstance(url, str) and url.startswith("/") and url.isascii() and url.isprintable() and " " not in url


def _seekable(name: str) -> BinaryIO:
    """A seekable file; a copy of standard input, and of what another program writes."""
    file = sys.stdin.buffer if name == "-" else Path(name).open("rb")  # noqa: SIM115 - whoever asks closes it
    if name != "-" and file.seekable():
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - and this
    with nullcontext() if name == "-" else file:
        shutil.copyfileobj(file, copy, 1 << 20)
    copy.seek(0)
    return copy


def _open_output(name: str, ids: set[str]) -> tuple[set[str], AbstractContextManager[IO[bytes]]] | None:
    """The ids of requests that an output already answers, and where to write further answers; None if another command
    is writing there. Raises ValueError as `_keep_answered`."""
    if name == "-":
        return set(), nullcontext(sys.stdout.buffer)
    path = Path(name)
    if path.exists() and not path.is_file():  # a pipe or device, which several may write to
        return set(), path.open("ab")
    if (output := _locked(path)) is None:
        return None
    try:
        return _keep_answered(path, output, ids)
    except BaseException:
        output.close()
        raise


def _locked(path: Path) -> BinaryIO | None:
    """A file opened for reading and appending, locked by this process until it is closed or the process ends; None if
    another one has it."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            told = f"{path} cannot be locked ({error.strerror}): no other command may write it meanwhile"
            print(f"twinlens: {told}", file=sys.stderr)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # another command has put a file in its place since it was opened


def _keep_answered(path: Path, output: BinaryIO, ids: set[str]) -> tuple[set[str], BinaryIO]:
    """The ids of requests that a locked output answers, and that output without failures, duplicates and an unfinished
    last line; answers to other requests stay. Raises ValueError, without changes, if the output has anything else."""
    answered, drops, line = set[str](), False, b""
    output.seek(0)
    for line in output:
        drops |= not _stays(path, line, ids, answered)
    if not drops and (not line or line.endswith(b"\n")):
        return answered, output
    again, real = set[str](), path.resolve()
    # The old output stays in place until the new one is complete.
    handle, name = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")
    os.close(handle)
    kept = Path(name).open("a+b")  # noqa: SIM115 - whoever writes answers closes it
    try:
        output.seek(0)
        for line in output:
            if _stays(path, line, ids, again):
                kept.write(line if line.endswith(b"\n") else line + b"\n")
        kept.flush()
        shutil.copymode(real, name)
        with suppress(OSError):  # as it was told
            fcntl.flock(kept, fcntl.LOCK_EX)
        Path(name).replace(real)
    except BaseException:
        kept.close()
        Path(name).unlink(missing_ok=True)
        raise
    output.close()
    return answered, kept


def _stays(path: Path, line: bytes, ids: set[str], answered: set[str]) -> bool:
    """Whether a line of an output stays; notes the ids of answers to these requests."""
    try:
        told = json.loads(line)
        found, response = told["custom_id"], told["response"]
        fine = response is not None and response["status_code"] == http.client.OK
        known = found in ids
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if not line.endswith(b"\n") and line.startswith(_BEGINS[: len(line)]):  # the end of a command that was killed
            return False
        raise ValueError(f"{path} is not an output of this command") from error
    if not known:
        return True
    stays = fine and found not in answered
    if fine:
        answered.add(found)
    return stays


@dataclass(frozen=True, slots=True)
class _Gateway:
    """The gateway's address, and the headers of requests."""

    host: str
    port: int
    base: str
    headers: dict[str, str]
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Gateway:
        url = urllib.parse.urlsplit(arguments.gateway)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"--gateway {arguments.gateway} is not an http or https address")
        if url.username is not None or url.query or url.fragment or not _is_path(url.path or "/"):
            raise ValueError(f"--gateway {arguments.gateway} is more than an address and a path")
        headers = {"content-type": "application/json", "user-agent": f"twinlens-batch/{__version__}"}
        if token := token_of(arguments):
            if url.scheme == "http" and url.hostname not in _HERE and not arguments.plaintext_token:
                raise ValueError("a token goes over https; --plaintext-token sends it over a network that you trust")
            headers["authorization"] = f"Bearer {token}"
        tls = ssl.create_default_context(cafile=arguments.ca_file) if url.scheme == "https" else None
        base = url.path.rstrip("/").removesuffix("/v1")  # as OpenAI's clients are told; requests name it themselves
        # If it is missing, the library would search for a port behind the last colon of an IPv6 address.
        port = url.port or (http.client.HTTP_PORT if tls is None else http.client.HTTPS_PORT)
        return cls(url.hostname, port, base, headers, tls)

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that is opened at its first request."""
        if self.tls is not None:
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self.tls)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)


@dataclass(slots=True)
class _Batch:
    """Requests in progress, from as many threads as allowed."""

    gateway: _Gateway
    jobs: Iterator[_Job]
    output: IO[bytes]
    arguments: argparse.Namespace
    count: int
    before: int = 0
    """Requests that were answered by an earlier command."""
    answered: int = 0
    failed: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    """Of prompts, and generated."""
    unreachable: str = ""
    """Why the last attempt without a response had none."""
    heard: bool = False
    """Whether there was any response."""
    _error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: bool = False
    """Nobody waits for answers any more."""
    _began: float = field(default_factory=time.monotonic)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Returns when all are answered or have failed; raises the error of writing an answer."""
        threads = [
            threading.Thread(target=self._work, daemon=True)  # not waited for when interrupted
            for _ in range(min(self.arguments.concurrency, max(1, self.count)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(1.0)
                    if sys.stderr.isatty():
                        print(f"\r{self.told()}", end="", file=sys.stderr, flush=True)
        finally:
            self._ended.set()
            self._left = True
            if sys.stderr.isatty():
                print("\r", end="", file=sys.stderr)
        if self._error is not None:
            raise self._error

    def told(self) -> str:
        """How far it is."""
        prompt, generated = self.tokens
        seconds = time.monotonic() - self._began
        earlier = f" ({self.before} more had been before)" if self.before else ""
        return (
            f"{self.answered} of {self.count} answered{earlier}, {self.failed} failed; {prompt} tokens of prompts,"
            f" {generated} generated, in {seconds:.0f} s"
        )

    def _work(self) -> None:
        connection = self.gateway.connect(self.arguments.timeout)
        try:
            while (job := self._next()) is not None:
                self._write(job, self._ask(connection, job))
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            self._error = error
            self._ended.set()
        finally:
            connection.close()

    def _next(self) -> _Job | None:
        with self._lock:
            return None if self._ended.is_set() else next(self.jobs, None)

    def _ask(self, connection: http.client.HTTPConnection, job: _Job) -> dict[str, Any]:
        """The result of a request: its response, or why there is none."""
        body = job.body
        if self.arguments.model and "model" not in body:
            body = {"model": self.arguments.model, **body}
        data, told = json.dumps(body).encode(), dict[str, Any]()
        for attempt in range(self.arguments.attempts):
            if attempt and self._ended.wait(self._pause(attempt, told)):
                break
            if connection.sock is not None and _speaks(connection.sock):
                connection.close()  # the gateway may have closed it meanwhile, and would not get the request
            try:
                connection.request("POST", self.gateway.base + job.path, data, self.gateway.headers)
                response = connection.getresponse()
                told = _told(response, response.read())
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                self._unanswered(str(error) or type(error).__name__)
                told = {"response": None, "error": {"code": "unreachable", "message": self.unreachable}}
                continue
            self.heard = True
            if not _may_change(response):
                break
            told["after"] = response.headers.get("retry-after")
        told.pop("after", None)
        return told

    def _unanswered(self, why: str) -> None:
        """Notes why there is no response; the first time, before there was any, it is shown."""
        with self._lock:
            first, self.unreachable = not (self.unreachable or self.heard), why
        if first and self.arguments.attempts > 1:
            print(f"twinlens: {self.arguments.gateway} does not answer ({why}); trying again", file=sys.stderr)

    @staticmethod
    def _pause(attempt: int, told: dict[str, Any]) -> float:
        """Seconds before another attempt: as the gateway asks, else about twice as long each time."""
        try:
            return min(_LONGEST_PAUSE, max(0.0, float(told.get("after") or "")))
        except ValueError:
            usual: float = min(_LONGEST_PAUSE, 0.25 * 2**attempt)
            return usual * random.uniform(0.5, 1.0)

    def _write(self, job: _Job, told: dict[str, Any]) -> None:
        line = json.dumps({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": job.id, **told}) + "\n"
        response = told["response"] or {}
        body, fine = response.get("body"), response.get("status_code") == http.client.OK
        usage = body.get("usage") if isinstance(body, dict) else None
        counts: dict[str, Any] = usage if isinstance(usage, dict) else {}
        with self._lock:
            if self._left:
                return
            self.output.write(line.encode())
            self.output.flush()
            self.answered, self.failed = self.answered + fine, self.failed + (not fine)
            for place, names in enumerate((("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))):
                self.tokens[place] += next((counts[name] for name in names if isinstance(counts.get(name), int)), 0)


def _may_change(response: http.client.HTTPResponse) -> bool:
    """Whether another attempt may be answered otherwise."""
    said = (response.headers.get("x-should-retry") or "").strip().lower()
    return said == "true" if said in ("true", "false") else response.status in _LATER


def _speaks(sock: socket.socket) -> bool:
    """Whether the other end of a connection has said something, though nothing was asked, or has closed it."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))


def _told(response: http.client.HTTPResponse, data: bytes) -> dict[str, Any]:
    """A response in the format of a batch's output; its body as text if it is not JSON."""
    read: Callable[[bytes], Any] = json.loads
    try:
        body = read(data)
    except (ValueError, RecursionError):
        body = data.decode("utf-8", "replace")
    request_id = response.headers.get("x-request-id") or ""
    return {"response": {"status_code": response.status, "request_id": request_id, "body": body}, "error": None}
