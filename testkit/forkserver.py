"""Processes of services without their imports, which are most of what a start costs: one process has imported
everything but torch, and forks for each light service and each gateway; another one has torch as well, and our kernels
as far as they are on disk, and forks for the real services; a third, a fork of the second, has transformers too, for
models that it computes. A fork of the service's, which did not go on, forks for its
children, and one of an engine's for its ranks.

What is forked is like what `python -m MODULE` starts, as far as tests see it: its parent is whoever asked for it
(`CLONE_PARENT`), and its environment, command line, standard streams and inherited descriptors are those asked for.
What it has of its own: it ends with its parent, so that of a suite that is killed no service is left, and where Python
would take apart all that was imported, it is over.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

from common.hardware import cuda_device_count
from common.hf import description as hf_description
from common.process.children import DEFAULTS, ChildProcess
from common.process.parent_link import die_with_parent
from testkit import triton_interpreter

ROOT = Path(__file__).resolve().parent.parent
TITLE = "forkserver"
"""The command line of a process that only forks."""

_DEADLY = ("tests.faults.deadly_engine", "tests.faults.deadly_process", "tests.faults.deadly_workers")
_LIGHT = ("testkit.light.encoder", "testkit.light.llm", "gateway", *_DEADLY)
_REAL = ("encoder_service", "llm_service")
_PARENTS = ("testkit.light.encoder", "testkit.light.llm", *_DEADLY, *_REAL, "llm_service.engine")
_CHILDREN = (
    *("encoder_service.media", "llm_service.grammar", "testkit.light.engine", "testkit.light.worker"),
    *("benchmarks.paced_engine", *_DEADLY),
)
_DESCRIBING = "common.hf.models"
_SERVICES = "benchmarks.services"
_COMPUTING = ("encoder_service.worker", "encoder_service.worker.planner", "llm_service.engine", "llm_service.worker")
_IMPORTS = (
    *("encoder_service.server", "common.process.malloc", "encoder_service.media.image"),
    *("encoder_service.media.audio", "encoder_service.media.video", "encoder_service.families.registry"),
    *("llm_service.server", "llm_service.worker.node", "llm_service.families.registry"),
    *("llm_service.engine.process", "llm_service.worker.block_tables", "llm_service.grammar.compiler", "llguidance"),
    *("gateway.server", "common.telemetry.tracing", "testkit.in_turn", "common.rpc.request_budget", "uvloop"),
)
_TO_COMPUTE = (
    *("encoder_service.worker.runner", "encoder_service.worker.hf.runner", "encoder_service.worker.graphs"),
    *("llm_service.worker.executor", "llm_service.worker.load", "llm_service.worker.ranks"),
    # What services import for their first model: a third of such a start.
    *("encoder_service.models.qwen3_vl", "llm_service.layers.cpu.layer", "llm_service.layers.cpu.numba_backend"),
)
_WITH_HF = (
    *("common.hf.models", "encoder_service.models.processor", "llm_service.models.trial"),
    *("transformers.generation", "transformers.modeling_utils", "transformers.processing_utils"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.processing_auto"),
)
_KERNELS = (
    *("lora_kernel", "decode_attention", "gdn_step", "panel_kernel", "prefill_attention", "quantized_kernel"),
    "row_kernels",
)
_TAKEN_AT_THE_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "NUMBA_", "GRPC_", "MALLOC_", "GLIBC_", "CUDA_", "OPENBLAS_")
"""How variables begin that a process looks at before it is asked anything: where they differ, none is forked."""

_servers: dict[tuple[str | None, Imports], Forkserver] = {}

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_LONGEST = 1 << 17
_MOST_DESCRIPTORS = 16
_ARGUMENTS_AT = 47  # arg_start and arg_end in /proc/PID/stat, from 0


class Imports(IntEnum):
    """What a process has imported that forks: each as much as the one before, and more."""

    LIGHT = 0
    TORCH = 1
    HF = 2


class Forked:
    """A process that was forked for us: what of `subprocess.Popen` the tests and `ChildProcess` use."""

    def __init__(self, pid: int, stdout: IO[str] | None = None, stdin: IO[str] | None = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:  # as long as nobody has asked how it ended, its number is nobody else's
            ended = os.pidfd_open(self.pid) if self.returncode is None else None
        if ended is not None:
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            waiting.poll(None if timeout is None else 1000 * timeout)
            os.close(ended)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forkserver:
    """One that has imported all that its children need, `below` a part of it, from which it is forked; ends with this
    process."""

    def __init__(self, environ: Mapping[str, str], imports: Imports, below: Forkserver | None = None) -> None:
        self._defaults = DEFAULTS if imports is not Imports.LIGHT else {}
        self._environ = {**self._defaults, **environ, "PYTHONUNBUFFERED": "1"}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Its last argument is room for the command lines of what it forks.
        command = [sys.executable, "-m", "testkit.forkserver", str(theirs.fileno()), str(int(imports)), " " * 8192]
        same = {fd: fd for fd in (1, 2, theirs.fileno())}
        self._process = (below and below.fork(command[2:], self._environ, same)) or subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=self._environ
        )
        theirs.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        self._control.close()
        self._process.wait()

    def start(self, module: str, flags: Sequence[str], environ: Mapping[str, str], stderr: int) -> Forked | None:
        """A service, whose standard output is read by us; None for what has to be started in another way."""
        read, write = os.pipe()
        with os.fdopen(write, "wb"), contextlib.ExitStack() as unread:
            lines = unread.enter_context(os.fdopen(read))
            if forked := self.fork([module, *flags], environ, {1: write, 2: stderr}):
                forked.stdout = lines
                unread.pop_all()
            return forked

    def fork(self, command: Sequence[str], environ: Mapping[str, str], fds: Mapping[int, int]) -> Forked | None:
        """A process that runs a module, with these descriptors under such numbers; None for what has to be started in
        another way."""
        if not _alike({**self._defaults, **environ}, self._environ):
            return None
        return Forked(_ask(self._control, command, environ, fds))

    def popen(self, command: Sequence[str], **given: Any) -> Any:
        """Starts a child process of this one, in place of `subprocess.Popen`."""
        return _popen(self._control, command, **given)


def start(module: str, flags: Sequence[str], environ: Mapping[str, str], stderr: int) -> Forked | None:
    """Has a service forked; None for what has to be started in another way."""
    if module not in (*_LIGHT, *_REAL):
        return None
    imports = Imports.LIGHT if module in _LIGHT else Imports.HF if _is_by_hf(flags) else Imports.TORCH
    server = forkserver(environ, imports)
    return server and server.start(module, flags, environ, stderr)


def popen(command: Sequence[str], *, stderr: IO[str] | None, **given: Any) -> Any:
    """Starts a service, in place of `subprocess.Popen` for `tools.launcher`."""
    errors = 2 if stderr is None else stderr.fileno()
    forked = start(command[2], command[3:], {**os.environ, "PYTHONUNBUFFERED": "1"}, errors)
    return forked or subprocess.Popen(command, stderr=stderr, **given)


def popen_benchmark(
    command: Sequence[str], *, stdout: int, env: Mapping[str, str], imports: Imports = Imports.TORCH, **given: Any
) -> Any:
    """Starts a benchmark that computes, with its output and its errors in one file, in place of `subprocess.Popen`. Its
    services are forked as well."""
    server = forkserver(environ := {**env, "NUMBA_NUM_THREADS": "1"}, imports)
    forked = server and server.fork(command[2:], environ, {1: stdout, 2: stdout})
    return forked or subprocess.Popen(command, stdout=stdout, env=env, **given)


def _is_by_hf(flags: Sequence[str]) -> bool:
    """Whether a service's model is one that transformers knows, and no family of ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="")
    file = Path(parser.parse_known_args(flags)[0].model) / "config.json"
    if not file.is_file():
        return False
    from common.hf.classes import transformers as loaded
    from llm_service.families.registry import find_family

    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return find_family(config) is None and config.get("model_type") in loaded().CONFIG_MAPPING
    except (ValueError, AttributeError):  # what a service is to refuse
        return False


def forkserver(environ: Mapping[str, str] = os.environ, imports: Imports = Imports.LIGHT) -> Forkserver | None:
    """Those of this process, one for each path that Python looks for modules on, each started at the first call for it;
    None where the system has not what it takes, and where services may compute on a GPU: its driver does not outlive a
    fork, and nothing that is imported beforehand may have asked it anything."""
    if not _CLONE or not hasattr(os, "pidfd_open") or cuda_device_count():
        return None
    kind = (environ.get("PYTHONPATH"), imports)
    if kind not in _servers:
        below = forkserver(environ, Imports.TORCH) if imports is Imports.HF else None
        _servers[kind] = Forkserver(environ, imports, below)
    return _servers[kind]


def _alike(environ: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(
        environ.get(name) == other.get(name) for name in {*environ, *other} if name.startswith(_TAKEN_AT_THE_START)
    )


def _ask(control: socket.socket, command: Sequence[str], environ: Mapping[str, str], fds: Mapping[int, int]) -> int:
    """Has a process forked, our child, with our descriptors under these numbers; returns its id."""
    order = json.dumps([list(command), dict(environ), list(fds)]).encode()
    assert len(order) <= _LONGEST
    socket.send_fds(control, [order], list(fds.values()))
    return int(control.recv(_LONGEST))


def _popen(
    control: socket.socket,
    command: Sequence[str],
    *,
    stdin: int,
    stderr: int,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
) -> Any:
    """Starts a child process, as `subprocess.Popen` does."""
    if command[2] not in (*_CHILDREN, *_COMPUTING) or (command[2] in _COMPUTING and "torch" not in sys.modules):
        return subprocess.Popen(command, stdin=stdin, stderr=stderr, pass_fds=pass_fds, env=env)
    pid = _ask(control, command[2:], env, {1: 1, 2: stderr, **{fd: fd for fd in pass_fds}})
    return Forked(pid)


def _popen_service(
    control: socket.socket,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: int | None = None,
    **given: Any,
) -> Any:
    """Starts a service of a benchmark, or a part of it, as `subprocess.Popen` does that reads what it says from a pipe,
    and has another one to write to where `stdin` says so."""
    ours = command[2] in (*_LIGHT, *_REAL) or _is_benchmark(command[2])
    if not ours or cwd is not None or not _alike({**DEFAULTS, **env}, {**DEFAULTS, **os.environ}):
        return subprocess.Popen(command, env=env, cwd=cwd, stdin=stdin, **given)
    read, write = os.pipe()
    pipes = {1: write, 2: 2}
    with contextlib.ExitStack() as theirs:
        theirs.enter_context(os.fdopen(write, "wb"))
        asked = None
        if stdin is not None:
            pipes[0], end = os.pipe()
            theirs.enter_context(os.fdopen(pipes[0], "rb"))
            asked = os.fdopen(end, "w")
        pid = _ask(control, command[2:], env, pipes)
    return Forked(pid, os.fdopen(read), asked)


def _run_forked(
    control: socket.socket, command: Sequence[str], *, check: bool, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Has transformers describe a model, as `subprocess.run` does with what it says captured as text."""
    if command[2] != _DESCRIBING or "torch" not in sys.modules:
        return subprocess.run(command, check=check, **given)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        forked = Forked(_ask(control, command[2:], os.environ, {1: out.fileno(), 2: errors.fileno()}))
        try:
            code = forked.wait(given["timeout"])
        finally:
            forked.kill()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), errors.read())


def _serve(control: socket.socket) -> tuple[list[str], dict[str, str], list[int]]:
    """Forks for each order, until nobody is left to give one. Returns in what was forked: what that is to run, in which
    environment, with which descriptors."""
    while True:
        order, fds, _, _ = socket.recv_fds(control, _LONGEST, _MOST_DESCRIPTORS)
        if not order:
            os._exit(0)
        if pid := _fork_for_parent():
            for fd in fds:
                os.close(fd)
            control.send(str(pid).encode())
            continue
        control.close()
        command, environ, numbers = json.loads(order)
        _place(fds, numbers)
        return command, environ, numbers


def _fork_for_parent() -> int:
    """`os.fork`, but for whose child it is: our parent's. We have one thread, so no lock is held by another."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(_syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    if pid < 0:
        raise OSError("no process can be forked")
    return pid


def _syscall(*arguments: Any) -> Any:
    call = ctypes.PyDLL(None).syscall  # which keeps the interpreter's lock
    call.restype = ctypes.c_long
    return call(*map(ctypes.c_long, arguments))


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Descriptors that were received get the numbers that they are to have."""
    above = max([*fds, *numbers]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(command: list[str], environ: Mapping[str, str], descriptors: list[int]) -> list[int]:
    """Takes over a process's command line and environment, as if it had been started with them. Returns which
    descriptors nobody but itself should have."""
    _entitle("\0".join([sys.executable, "-m", *command]))
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return [fd for fd in descriptors if fd > 2]


def _entitle(title: str) -> None:
    """Writes over the command line that the kernel shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[_ARGUMENTS_AT - 2 + n]) for n in range(2))
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _fork_for_children(own: list[int]) -> list[int] | None:
    """In a service or an engine, before it has any thread: leaves a fork behind, which then forks for each of its
    children. Returns None; in such a child, the descriptors of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service = os.getpid()
    if os.fork():
        theirs.close()
        ChildProcess.popen = functools.partial(_popen, ours)  # type: ignore[assignment]
        hf_description.run = functools.partial(_run_forked, ours)
        if _is_benchmark(sys.argv[0]):
            importlib.import_module(_SERVICES).popen = functools.partial(_popen_service, ours)
        return None
    ours.close()
    die_with_parent(service)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _entitle(TITLE)
    for fd in own:
        os.close(fd)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    return _become(*_serve(theirs))


def _is_benchmark(module: str) -> bool:
    return module.partition(".")[0] == "benchmarks"


def _load_kernels() -> None:
    """Those of ours that are on disk; what compiles or loads them has been set up in any case."""
    from common.cpu.jit import find

    for name in _KERNELS:
        module = f"llm_service.layers.cpu.{name}"
        for key in importlib.import_module(module).TYPED:
            find(f"{module}:{key}").load()


def _load_library() -> None:
    """As much of it as every model needs."""
    from common.hf.classes import transformers as loaded

    loaded()
    for module in _WITH_HF:
        importlib.import_module(module)


def own_locks() -> None:
    """Gives this process a lock of its own in the stead of one that all forks share: numba starts its threads under
    it, and a fork that is killed meanwhile would leave it taken for all that come later."""
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    if parallel is not None and parallel._backend_init_process_lock is not None:
        parallel._set_init_process_lock()  # type: ignore[attr-defined]


def _run(module: str) -> None:
    """Is the module, and ends as Python does, but for its last step: it writes to all that was imported, which the
    kernel would have to copy first."""
    code: Any = 0
    own_locks()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main(control: int, imports: Imports) -> None:
    """Serves, and is what it has forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever reads a test's output has interrupted that
    parent = os.getppid()
    die_with_parent(parent)
    for module in (*_IMPORTS, *(_TO_COMPUTE if imports else ())):
        importlib.import_module(module)
    if imports:
        _load_kernels()
    if imports is Imports.HF:
        _load_library()
        if os.environ.get("TRITON_INTERPRET") == "1":
            triton_interpreter.quicken()  # which transformers has imported
    gc.collect()
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread was started by an import"
    own: list[int] | None = _become(*_serve(socket.socket(fileno=control)))
    die_with_parent(parent)
    while own is not None and (sys.argv[0] in _PARENTS or _is_benchmark(sys.argv[0])):
        own = _fork_for_children(own)  # what was left behind is a child by now, which may be an engine
    _run(sys.argv[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), Imports(int(sys.argv[2])))
