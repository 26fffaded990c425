"""Child processes that speak msgpack over a socket pair and never outlive their parent: it starts `python -m MODULE`,
which inherits a socket and descriptors of shared memory, and exchanges `msgspec` structs with it, each after its
length. Either side sees the other's death as the end of the socket; the kernel kills a child whose parent dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from common.aio import tasks
from common.process.stacks import Stacks
from common.telemetry import stderr_capture

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
MAX_MESSAGE = 256 << 20
"""Bytes of the largest message that either side accepts."""

DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "THP_MEM_ALLOC_ENABLE": "1"}
"""Threads that wait spin for microseconds, then sleep: processes that share cores would else hold each other up
several times over. torch asks for large pages for what is large, so that weights are read without a look-up every 4
KiB (docs/PERFORMANCE.md). The environment of the service has the last word."""

_HARMLESS = (
    *("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHON", "VIRTUAL_ENV"),
    *("OMP_", "GOMP_", "UCX_", "FI_", "NIXL_"),
)
"""How variables begin that a process needs to run at all, or that say how it computes, or which network it uses."""

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

HELD_UP_SECONDS = 30.0
"""How long a process is waited for that is held up: not without end, since one that spins for ever looks no different.
"""

_ASK_SECONDS = 0.5
_LAST_SECONDS = 1.0
"""In which a process that says nothing more has ended, as a rule; then it is killed."""

ReceiveT = TypeVar("ReceiveT")


def harmless(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a process may have that parses what strangers send: no token, password or address.

    >>> harmless({"PATH": "/bin", "TWINLENS_ENCODER_AUTH_TOKEN": "open sesame", "AWS_SECRET_ACCESS_KEY": "x"})
    {'PATH': '/bin'}
    """
    return {name: value for name, value in environ.items() if name.startswith(_HARMLESS)}


def die_with_parent(parent: int = 0) -> None:
    """Asks the kernel to kill this process when its parent ends; exits at once if it has ended already. A process that
    was forked says who its `parent` is; for one that `Child` has started, the environment does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != (str(parent) if parent else os.environ.get("TWINLENS_PARENT", str(os.getppid()))):
        raise SystemExit("the parent process has ended")


def hide_memory() -> None:
    """From now on other processes of the same user can neither read this one's memory and environment nor trace it, and
    it leaves no core dump. A program that it starts can be seen as any other."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)


def leave_signals_to_parent() -> None:
    """Ignores what a terminal sends to all that run there, and systemd to all of a unit: the parent lets running work
    finish first, and ends us then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def is_held_up(pid: int) -> bool:
    """Whether a process of this host that does not get on is slow, and not stopped or stuck: a thread of it runs, waits
    for a core, or waits for a disk, be it for memory that was swapped out. False where it has ended."""
    return not is_stopped(pid) and bool({"R", "D"} & set(_thread_states(pid)))


def is_stopped(pid: int) -> bool:
    """Whether a process of this host has been stopped, as by SIGSTOP or a debugger."""
    return bool({"T", "t"} & set(_thread_states(pid)))


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process of this host has had, all of its threads together, in steps of a hundredth of a
    second; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def was_ended(status: int | None) -> bool:
    """Whether somebody ended a process with this exit status (`returncode`) from outside, the kernel where memory ran
    out among them: what it did itself shows in another one. So it is where the status is not known."""
    return status is None or -status in _FROM_OUTSIDE


def how_it_ended(status: int | None) -> str:
    """An exit status (`returncode`) in words, for the log.

    >>> how_it_ended(70), how_it_ended(-9)
    ('exit status 70', 'killed by SIGKILL')
    """
    if status is None:
        return "it has not ended"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):  # some have no name
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def _thread_states(pid: int) -> Iterator[str]:
    """One letter for each thread, as the kernel shows it."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            yield stat.read_text().rpartition(")")[2].split()[0]


class ChildProcess:
    """A program that inherits these descriptors. Not the event loop starts it, nor waits for it: uvloop would run
    Python between fork and exec, beside gRPC's threads."""

    popen: Callable[..., Any] = subprocess.Popen
    """What starts it. Those who start many services in a row have something faster."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], fds: Sequence[int]) -> None:
        self._started: subprocess.Popen[bytes] = self.popen(
            command, stdin=subprocess.DEVNULL, stderr=stderr_capture.descriptor(), pass_fds=fds, env=environ
        )
        self._ended = tasks.in_daemon_thread(self._started.wait)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, -N by signal N; None as long as that is not known."""
        return self._started.poll()

    async def wait(self) -> int:
        """Returns how it ended, when it has. A thread waits for that; where it could not begin, or memory ran out under
        it, we ask now and then."""
        ended = asyncio.wrap_future(self._ended)
        try:
            while (status := self.returncode) is None:
                if ended.done():
                    await asyncio.sleep(_ASK_SECONDS)
                else:
                    await asyncio.wait({ended}, timeout=_ASK_SECONDS)
        finally:
            if not ended.cancel() and not ended.cancelled():
                ended.exception()  # nobody will ask for it
        return status

    def kill(self) -> None:
        """Kills it, where it has not ended."""
        self._started.kill()

    def send_signal(self, number: int) -> None:
        """Sends it a signal, where it has not ended."""
        self._started.send_signal(number)


class Child(Generic[ReceiveT]):
    """The parent's end of one child process. Owned by whoever starts it, ended by `stop`.

    `receive` raises `ChildDied` when the child is gone, whatever the cause.
    """

    def __init__(
        self,
        process: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: Any,
        stacks: Stacks | None = None,
    ) -> None:
        self.process = process
        self._stacks = stacks
        self._reader = reader
        self._writer = writer
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(received).decode

    @classmethod
    async def start(
        cls, module: str, *, receives: Any, fds: Sequence[int] = (), exposed: bool = False, stacks: bool = False
    ) -> Child[Any]:
        """Starts `python -m module SOCKET_FD FD…`; `receives` is the type (or union) of the child's messages.

        One that is `exposed` to what strangers send gets no variable that could be a secret. One with `stacks` calls
        `stacks.write_when_asked`, and `post_mortem` can tell in what it hangs.
        """
        environ = harmless(os.environ) if exposed else os.environ
        told = Stacks() if stacks else None
        try:
            return await cls._start(module, {**DEFAULTS, **environ}, fds, receives, told)
        except BaseException:
            if told is not None:
                told.close()
            raise

    @classmethod
    async def _start(
        cls, module: str, environ: Mapping[str, str], fds: Sequence[int], receives: Any, stacks: Stacks | None
    ) -> Child[Any]:
        more, inherited = ({}, fds) if stacks is None else (stacks.environ, (*fds, stacks.fd))
        ours, theirs = socket.socketpair()
        try:
            process = ChildProcess(
                [sys.executable, "-m", module, str(theirs.fileno()), *map(str, fds)],
                {**environ, **more, "TWINLENS_PARENT": str(os.getpid())},
                (theirs.fileno(), *inherited),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        except BaseException:  # whoever wanted it does so no more
            process.kill()
            ours.close()
            await process.wait()
            raise
        return cls(process, reader, writer, receives, stacks)

    def send(self, message: Any) -> None:
        """Queues a message; the child's death is reported by `receive`, not here."""
        if not self._writer.is_closing():
            body = self._encode(message)
            self._writer.write(_LENGTH.pack(len(body)))
            self._writer.write(body)

    async def receive(self) -> ReceiveT:
        """The child's next message; raises ChildDied when there will be none."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE:
                raise ChildDied("a message is too long")
            message: ReceiveT = self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildDied("the process has ended") from error
        except msgspec.MsgspecError as error:
            raise ChildDied("a message cannot be read") from error
        return message

    @property
    def has_ended(self) -> bool:
        """It is known to be gone, and everything that it said has been received."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def stacks(self) -> dict[str, str]:
        """For the log: the `stacks` of its threads, where it tells them within a second. It may be ended by that, so
        this is for one that is about to be killed."""
        if self._stacks is None or is_stopped(self.process.pid):
            return {}
        told = await self._stacks.read(self.process.send_signal)
        return {"stacks": told} if told else {}

    async def post_mortem(self) -> dict[str, str]:
        """For the log: the `status` of a child that has ended, else its `stacks`. It is killed then."""
        try:
            return await self._status() if self.has_ended else await self.stacks()
        finally:
            self.kill()

    async def _status(self) -> dict[str, str]:
        """How it has ended; nothing where it takes long over that."""
        with contextlib.suppress(TimeoutError):
            async with tasks.StallTolerantTimeout(_LAST_SECONDS):
                return {"status": how_it_ended(await self.process.wait())}
        return {}

    async def stop(self, grace: float = 5.0) -> None:
        """Ends the child: closes the socket (it exits), kills it after `grace` seconds; returns when it is gone."""
        self._writer.close()
        if self._stacks is not None:
            self._stacks.close()
        try:
            await asyncio.wait_for(self.process.wait(), grace)
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        """Kills the child at once."""
        self.process.kill()


class ChildDied(Exception):
    """A child process is gone, or no longer makes sense."""


class ParentLink(Generic[ReceiveT]):
    """The child's end: blocking, for a process that computes in one thread.

    `receive` raises EOFError when the parent is gone, and the child should then exit.
    """

    def __init__(self, fd: int, receives: Any) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends a message, from any thread; raises EOFError when the parent is gone."""
        body = self._encode(message)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionError) as error:
            raise EOFError("the parent process has ended") from error

    def receive(self) -> ReceiveT:
        """Waits for the parent's next message."""
        while (message := self._take()) is None:
            self._fill(0)
        return message

    def poll(self) -> ReceiveT | None:
        """The parent's next message if one is here, else None."""
        message = self._take()
        while message is None and self._fill(socket.MSG_DONTWAIT):
            message = self._take()
        return message

    def _take(self) -> ReceiveT | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: ReceiveT = self._decode(memoryview(self._buffer)[_LENGTH.size : end].tobytes())
        del self._buffer[:end]
        return message

    def _fill(self, flags: int) -> bool:
        """Reads what has come; False where nothing has."""
        try:
            piece = self._socket.recv(1 << 20, flags)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise EOFError("the parent process has ended") from error
        if not piece:
            raise EOFError("the parent process has ended")
        self._buffer += piece
        return True
