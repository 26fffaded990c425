"""A decoder in which strangers' code runs: what it can do in a decode process, as what it refuses says."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.process.seccomp import _ARCHITECTURES
from encoder_service.item import Inspection
from encoder_service.media.messages import DecoderSettings

_libc = ctypes.CDLL(None, use_errno=True)
_PTRACE_SEIZE = 0x4206
_CALLS = {  # by name: x86-64, aarch64, and the first arguments
    "bpf": (321, 280, 0),
    "io_uring_setup": (425, 425, 1, 0),
    "userfaultfd": (323, 282, 0),
    "unshare": (272, 97, 0x1000_0000),
    "perf_event_open": (298, 241, 0),
    "pidfd_open": (434, 434, os.getppid(), 0),
    "keyctl": (250, 219, 0),
    "memfd_create": (319, 279, 0, 0),
    "chmod": (268, 53, -100, 0, 0),
    "unlinkat": (263, 35, -100, 0, 0),
    "process_vm_readv": (310, 270, os.getppid(), 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 271, os.getppid(), 0, 0, 0, 0, 0),
    "rt_sigqueueinfo": (129, 138, os.getppid(), 0, 0),
    "tkill": (200, 130, os.getppid(), 0),
    "seccomp": (317, 277, 1, 0, 0),
    "setns": (308, 268, 0, 0),
    "recvmsg": (47, 212, 1, 0, 0),
    "sendmsg": (46, 211, 1, 0, 0),
    "landlock": (444, 444, 0, 0, 1),
    "none of any number": (0x4000_0002, 0x4000_0002),
}


class Escape:
    """Tries all of it when it is to look at a file."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None: ...

    @staticmethod
    def prepare() -> None:
        """It is here already."""

    def inspect(self) -> Inspection:
        """Refuses any file, and says of each attempt that did not fail with EPERM how it ended."""
        os.close(0)
        attempts = dict(_attempts())
        raise ValueError(json.dumps({name: _tried(attempt) for name, attempt in attempts.items()}))

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        """It never comes to that."""
        return iter(())


def _tried(attempt: Callable[[], Any]) -> str:
    try:
        done = attempt()
    except PermissionError:
        return "EPERM"
    except Exception as error:  # noqa: BLE001 - a test looks at it
        return repr(error)
    return f"done: {done!r}"


def _attempts() -> Iterator[tuple[str, Callable[[], Any]]]:
    parent = os.getppid()
    yield "a file", lambda: os.open("/etc/passwd", os.O_RDONLY)
    yield "the parent's environment", lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY)
    yield "a file's name", lambda: Path("/proc/self/exe").readlink()
    yield "a socket", socket.socket
    yield "a pair of sockets", socket.socketpair
    yield "connect", lambda: _libc_call("connect", 1, 0, 0)
    yield "bind", lambda: _libc_call("bind", 1, 0, 0)
    yield "a pipe", os.pipe
    yield "ptrace", lambda: _libc_call("ptrace", _PTRACE_SEIZE, parent, 0, 0)
    yield "another program", lambda: os.execv("/no/such/program", ["program"])
    yield "a process", _forked
    yield "a process with a program", lambda: subprocess.Popen(["/no/such/program"], close_fds=False)
    yield "a signal to the parent", lambda: os.kill(parent, 0)
    yield "a signal to all", lambda: os.kill(-1, 0)
    yield "a signal of a descriptor", lambda: _libc_call("fcntl", 1, 8, parent)
    yield "a higher limit", _limited
    yield "the parent's limits", lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE)
    yield "mount", lambda: _libc_call("mount", 0, 0, 0, 0, 0)
    yield "prctl", lambda: _libc_call("prctl", 4, 1, 0, 0, 0)
    yield "a terminal", lambda: _libc_call("ioctl", 1, 0x5401, 0)
    column = _ARCHITECTURES[os.uname().machine][0]
    for name, numbers in _CALLS.items():
        yield name, partial(_libc_call, "syscall", numbers[column], *numbers[2:])
    yield "a signal to itself", lambda: os.kill(os.getpid(), 0)
    yield "a signal that it catches", _caught
    yield "a thread", _in_thread
    yield "memory", lambda: len(mmap.mmap(-1, 1 << 20))
    yield "its limits", lambda: resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "a thread's attempt", lambda: _in_thread(lambda: os.open("/etc/passwd", os.O_RDONLY))


def _libc_call(name: str, *arguments: int) -> int:
    result: int = getattr(_libc, name)(*map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def _forked() -> None:
    if not os.fork():
        os._exit(0)


def _limited() -> int:
    limits = (ctypes.c_ulong * 2)(4, 4)
    return _libc_call("setrlimit", resource.RLIMIT_NOFILE, ctypes.addressof(limits))


def _caught() -> str:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    signal.raise_signal(signal.SIGUSR1)
    return str(seen == [signal.SIGUSR1])


def _in_thread(work: Callable[[], Any] = lambda: "work") -> Any:
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(work())
        except OSError as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]
