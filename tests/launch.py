"""Services as child processes of a test: started on a free port, stopped with SIGTERM, checked for leavings.

They are light (`testkit.light`) unless a test says `light=False`, as those do that are about what is computed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from testkit import forkserver
from testkit.forkserver import TITLE, Forked
from tests.waiting import until
from tests.with_parent import with_parent

ROOT = Path(__file__).resolve().parent.parent
_READY = "ready "
_STOP_SECONDS = 120
_ENCODER = {True: "testkit.light.encoder", False: "encoder_service"}
_LLM = {True: "testkit.light.llm", False: "llm_service"}
Process: TypeAlias = subprocess.Popen[str] | Forked
_LIGHT = {"encoder_service.worker": "testkit.light.worker", "llm_service.engine": "testkit.light.engine"}


@dataclass(frozen=True, slots=True)
class Service:
    """A running service: where it serves, its process, the file that its log goes to, and its metrics' address."""

    address: str
    process: Process
    log: Path
    metrics: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def descendants(self) -> dict[int, str]:
        """Every living process below this one: its command line by its id."""
        return descendants(self.pid)

    def children(self, module: str) -> list[int]:
        """Direct or indirect child processes that run `python -m module`, or what stands for it in light services."""
        named = tuple(f"-m {name} " for name in (module, _LIGHT.get(module, module)))
        return [pid for pid, line in self.descendants().items() if any(name in line + " " for name in named)]


@contextlib.contextmanager
def launch(
    module: str, *flags: str, environ: dict[str, str] | None = None, exit_code: int | None = 0, fork: bool = True
) -> Iterator[Service]:
    """Runs `python -m module FLAGS` for the length of the block, from its `ready` line to SIGTERM.

    Asserts that it ends with `exit_code` (None: any), that no process of its is left, nothing in /dev/shm that one of
    them had mapped, and nothing held at its end by its own account. A service that ends before it is ready raises
    RuntimeError with its log. Where `fork` allows it, `testkit.forkserver` saves it most imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w", encoding="utf-8") as errors:
            given = {**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})}
            process = start(module, *flags, environ=given, errors=errors.fileno(), fork=fork)
        assert process.stdout is not None
        known: set[int] = set()
        try:
            ready = _ready(process.stdout, process, log)
            service = Service(ready.get("grpc") or ready["http"], process, log, ready.get("metrics", ""))
            yield service
            known = set(service.descendants())
            shared = set().union(*map(_shared_memory, {process.pid, *known}))
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(_STOP_SECONDS)
            assert exit_code is None or code == exit_code, f"exit code {code}\n{_tail(log)}"
            # One that was killed could not wait for its own, who notice by themselves: kernels that are compiled
            # for a worker, or all processes of the service.
            until(lambda: not _living(known), "no process of the service is left")
            assert not [path for path in shared if path.exists()], "shared memory was left"
            assert "something is still held" not in log.read_text(encoding="utf-8"), _tail(log)
        finally:
            for pid in {*known, *descendants(process.pid)}:
                send(pid, signal.SIGKILL)
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


def start(module: str, *flags: str, environ: dict[str, str], errors: int = 2, fork: bool = True) -> Process:
    """A process that runs `python -m module FLAGS`, whose standard output is read here."""
    forked = forkserver.start(module, flags, environ, errors) if fork else None
    return forked or subprocess.Popen(
        with_parent(sys.executable, "-m", module, *flags),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environ,
    )


def _living(processes: set[int]) -> dict[int, str]:
    return {pid: line for pid in processes if (line := command_line(pid))}


@contextlib.contextmanager
def encoder_server(
    model: Path,
    *,
    light: bool = True,
    exit_code: int | None = 0,
    module: str = "",
    fork: bool = True,
    **flags: object,
) -> Iterator[Service]:
    """An encoder on a free port, as the `module`; `store_bytes="8MiB"` becomes `--store-bytes=8MiB`."""
    given = _flags(**{"model": model, "listen": "127.0.0.1:0", **flags})
    with launch(module or _ENCODER[light], *given, exit_code=exit_code, fork=fork) as service:
        yield service


@contextlib.contextmanager
def llm_server(
    model: Path, *encoders: str, light: bool = True, exit_code: int | None = 0, fork: bool = True, **flags: object
) -> Iterator[Service]:
    """An LLM service on a free port, with the encoders at these addresses."""
    given = _flags(**{"model": model, "listen": "127.0.0.1:0", "encoders": ",".join(encoders), **flags})
    with launch(_LLM[light], *given, exit_code=exit_code, fork=fork) as service:
        yield service


def send(pid: int, number: signal.Signals) -> None:
    """Signals a process that may have ended by now: services end and replace their own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def stop(pid: int) -> None:
    """Has a process stand still, and returns when each of its threads does: one that has no core just now hears of it
    later, and the others go on until then."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: set(_states(pid)) <= set("TtZX"), "it stands still")


def _states(pid: int) -> Iterator[str]:
    """That of each thread, as far as the process lives."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes stand still for the length of the block, as far as they live that long."""
    assert pids
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)


@contextlib.contextmanager
def gateway(*llms: str, exit_code: int | None = 0, fork: bool = True, **flags: object) -> Iterator[Service]:
    """A gateway on a free port, with the LLM services at these addresses."""
    given = _flags(**{"listen": "127.0.0.1:0", "llm": ",".join(llms), **flags})
    with launch("gateway", *given, exit_code=exit_code, fork=fork) as service:
        yield service


def command_line(pid: int) -> str:
    """A living process's command line; empty for one that is gone or has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if status in "ZX" else line.replace(b"\0", b" ").decode(errors="replace").strip()


def descendants(pid: int) -> dict[int, str]:
    """Every living process below `pid`: its command line by its id. One that only forks is none of these."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, task.read_text().split()):
                if (line := command_line(child)) and line != TITLE:
                    found[child] = line
                found |= descendants(child)
    return found


def _ready(stdout: IO[str], process: Process, log: Path) -> dict[str, str]:
    """The addresses that the `ready` line names."""
    for line in stdout:
        if line.startswith(_READY):
            return dict(word.split("=", 1) for word in line.removeprefix(_READY).split())
    raise RuntimeError(f"the service ended with {process.wait()} before it was ready\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-4000:]


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


_OF_CUDA = "cuda.shm."
"""What the driver has for processes that open each other's memory, and leaves there when one is killed."""


def _shared_memory(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    found = {Path(line[line.index("/dev/shm/") :]) for line in maps.splitlines() if "/dev/shm/" in line}
    return {path for path in found if not path.name.startswith(_OF_CUDA)}
