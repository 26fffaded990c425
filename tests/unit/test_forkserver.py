"""What the forkserver forks is like what `python -m` starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit import forkserver
from tests.launch import ROOT, Service, command_line, encoder_server, launch, llm_server
from tests.waiting import until
from tools import launcher


@pytest.fixture(params=[True, False], ids=["forked", "started"])
def service(request: pytest.FixtureRequest, checkpoint: Path):
    with encoder_server(checkpoint, decode_processes=1, fork=request.param) as running:
        assert isinstance(running.process, forkserver.Forked) == request.param
        yield running


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _shown(service: Service) -> list[str]:
    """The command lines of its processes, without the numbers that are another each time."""
    lines = [command_line(service.pid), *service.descendants().values()]
    return sorted(re.sub(r"\d+", "N", line.partition(" ")[2]) for line in lines)


def test_its_processes_have_their_command_lines_and_their_parents(service: Service, checkpoint: Path) -> None:
    flags = f"--model={checkpoint} --listen=127.0.0.1:0 --decode-processes=1"
    encoder = re.sub(r"\d+", "N", f"-m testkit.light.encoder {flags}")
    assert _shown(service) == ["-m encoder_service.media N N", encoder, "-m testkit.light.worker N N N"]
    assert _parent(service.pid) == os.getpid()
    assert {_parent(pid) for pid in service.descendants()} == {service.pid}


def test_its_processes_hold_no_descriptor_of_ours(service: Service) -> None:
    [decoder] = service.children("encoder_service.media")
    ours = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    theirs = {path.name: str(path.readlink()) for path in Path(f"/proc/{decoder}/fd").iterdir()}
    assert theirs["0"] == os.devnull
    assert not {link for link in theirs.values() if link.startswith("socket:")} & ours
    assert len(theirs) == 7, "standard streams, two copies of one, the link, the arena"


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_engines_and_their_ranks_are_like_those_that_are_started(checkpoint: Path, fork: bool) -> None:
    with llm_server(checkpoint, light=False, tp=2, threads=1, kv_cache_bytes="1MiB", fork=fork) as service:
        assert isinstance(service.process, forkserver.Forked) == fork
        [engine], [rank] = (service.children(f"llm_service.{name}") for name in ("engine", "worker"))
        assert [_parent(pid) for pid in (service.pid, engine, rank)] == [os.getpid(), service.pid, engine]
        assert {"-m llm_service.engine N N", "-m llm_service.worker N N"} < set(_shown(service))
        links = [_link(rank), _link(engine)]
        assert links[0] not in _open(engine), "each has its own end"
        assert links[1] not in _open(rank)


def _link(pid: int) -> str:
    """The socket that a child process was given."""
    return str(Path(f"/proc/{pid}/fd/{command_line(pid).split()[3]}").readlink())


def _open(pid: int) -> set[str]:
    return {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}


def test_services_that_tools_start_are_forked_where_a_test_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.Service, "popen", staticmethod(forkserver.popen))
    with launcher.Service("the gateway", "gateway", ["--listen=127.0.0.1:0", "--llm=127.0.0.1:1"]) as service:
        assert service.wait_ready(60).startswith("127.0.0.1:")
        assert isinstance(service._process, forkserver.Forked)
        assert service.stop() == 0


def test_its_processes_end_with_it(checkpoint: Path) -> None:
    with encoder_server(checkpoint, decode_processes=1, exit_code=-signal.SIGKILL) as service:
        assert isinstance(service.process, forkserver.Forked)
        service.process.kill()  # the end of the block waits for the others
        assert service.process.wait(180) == -signal.SIGKILL


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "started"])
def test_they_end_with_a_suite_that_is_killed(fork: bool) -> None:
    suite = f"""
from tests.launch import launch

with launch("gateway", "--listen=127.0.0.1:0", "--llm=127.0.0.1:1", fork={fork}) as service:
    print(service.pid, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", suite], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        service = int(process.stdout.readline())
        assert " -m gateway " in command_line(service)
        process.terminate()
    until(lambda: not command_line(service), "the service has ended as well")


def test_what_a_process_reads_before_it_is_asked_is_not_forked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch("gateway", "--listen=127.0.0.1:0", "--llm=127.0.0.1:1") as plain:
        assert isinstance(plain.process, forkserver.Forked)
    monkeypatch.setenv("GRPC_VERBOSITY", "error")
    with launch("gateway", "--listen=127.0.0.1:0", "--llm=127.0.0.1:1") as other:
        assert not isinstance(other.process, forkserver.Forked)
        assert b"GRPC_VERBOSITY=error" in Path(f"/proc/{other.pid}/environ").read_bytes()


def test_a_fork_that_is_killed_as_it_starts_threads_keeps_no_other_from_it() -> None:
    parallel = pytest.importorskip("numba.np.ufunc.parallel")
    parallel._set_init_process_lock()  # which forks share

    def killed() -> None:
        parallel._backend_init_process_lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    def other() -> None:
        forkserver.own_locks()
        os._exit(0 if parallel._backend_init_process_lock.acquire(timeout=1) else 1)

    ended = []
    for does in (killed, other):
        pid = os.fork()
        if not pid:
            does()
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    parallel._set_init_process_lock()
    assert ended == [-signal.SIGKILL, 0]
