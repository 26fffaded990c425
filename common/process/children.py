"""The parent's end of child processes that speak msgpack over a socket pair: it starts `python -m MODULE`, which
inherits a socket and descriptors of shared memory, and exchanges `msgspec` structs with it, each preceded by its
length. `parent_link` is the child's end. Each side sees the other's death as the end of the socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from common.aio import tasks
from common.process.parent_link import LENGTH
from common.process.stacks import Stacks
from common.process.status import how_it_ended, is_stopped
from common.telemetry import stderr_capture

MAX_MESSAGE = 256 << 20
"""Bytes of the largest message that a parent accepts."""

DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "THP_MEM_ALLOC_ENABLE": "1"}
"""Waiting threads spin for microseconds, then sleep: otherwise processes that share cores slow each other down several
times over. torch asks for huge pages for large tensors, which saves a TLB miss every 4 KiB (docs/PERFORMANCE.md). The
service's environment takes precedence."""

_HARMLESS = (
    *("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHON", "VIRTUAL_ENV"),
    *("OMP_", "GOMP_", "UCX_", "FI_", "NIXL_"),
)
"""Prefixes of variables that a process needs to run, or that affect how it computes or which network it uses."""

_ASK_SECONDS = 0.5
_LAST_SECONDS = 1.0
"""Seconds in which a process that has closed its socket usually ends; then it is killed."""

ReceiveT = TypeVar("ReceiveT")


def harmless(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a process may have that parses what strangers send: no token, password or address.

    >>> harmless({"PATH": "/bin", "TWINLENS_ENCODER_AUTH_TOKEN": "open sesame", "AWS_SECRET_ACCESS_KEY": "x"})
    {'PATH': '/bin'}
    """
    return {name: value for name, value in environ.items() if name.startswith(_HARMLESS)}


class ChildProcess:
    """A program that inherits these descriptors. It is started and awaited in a thread, not by the event loop: uvloop
    would run Python code between fork and exec, beside gRPC's threads."""

    popen: Callable[..., Any] = subprocess.Popen
    """Starts it. Tests that start many services replace it by something faster."""

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
        """Returns its exit status when it has ended. A thread waits for that; if it could not start, or memory ran out,
        the status is polled."""
        ended = asyncio.wrap_future(self._ended)
        try:
            while (status := self.returncode) is None:
                if ended.done():
                    await asyncio.sleep(_ASK_SECONDS)
                else:
                    await asyncio.wait({ended}, timeout=_ASK_SECONDS)
        finally:
            if not ended.cancel() and not ended.cancelled():
                ended.exception()  # nobody else will retrieve it
        return status

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        self._started.kill()

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        self._started.send_signal(number)


class Child(Generic[ReceiveT]):
    """The parent's end of one child process, owned by whoever starts it, and ended by `stop`.

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

        An `exposed` child, which handles strangers' data, gets no variable that could be a secret. With `stacks`, the
        child calls `stacks.write_when_asked`, and `post_mortem` can tell where it hangs.
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
        except BaseException:  # its caller does not want it any more
            process.kill()
            ours.close()
            await process.wait()
            raise
        return cls(process, reader, writer, receives, stacks)

    def send(self, message: Any) -> None:
        """Queues a message; the child's death is reported by `receive`, not here."""
        if not self._writer.is_closing():
            body = self._encode(message)
            self._writer.write(LENGTH.pack(len(body)))
            self._writer.write(body)

    async def receive(self) -> ReceiveT:
        """The child's next message; raises ChildDied when there will be none."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
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
        """For the log: the `stacks` of its threads, if it writes them within a second. This may kill it, so it is for a
        child that is about to be killed."""
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
        """Its exit status; empty if it takes long to end."""
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
